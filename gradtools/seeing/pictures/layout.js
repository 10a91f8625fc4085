// Computes the positions of all boxes, frames and lines of a graph, for given open blocks. A page
// runs this script when blocks open and close, and drawing.py runs it for an SVG file.
//
// Each block gets a layered layout (Sugiyama, Tagawa and Toda, 1981). Children are assigned to rows
// by longest path, with a limit on the width of a row. An arrow that spans several rows has a dummy
// place in each row. The order within rows is computed by barycentre sweeps; the order with the
// fewest crossings is kept. An arrow that enters or leaves a block has a port, a place in an extra
// row above the first or below the last row. Arrows between columns, and arrows that span more than
// LONGEST rows, are threads.
//
// Open blocks are laid out separately, inner blocks first. Along a row, the places are pulled
// towards the mean of their neighbours in the next row and keep their order and distance:
//
//     minimise  sum_i w_i (x_i - d_i)^2   subject to   x_(i+1) - x_i >= s_i
//
// This problem is solved exactly by pooling adjacent violators, in a few sweeps down and up. Lines
// that pass have larger weights than boxes, so long lines are straight. Rows never overlap, and
// only lines run between two rows, so no line runs through a box.
//
// Columns are drawn side by side. Forward runs down and backward runs up, and each row is placed as
// near as possible to the rows whose residuals it reads. A strand is a smooth line through its
// places. A thread leaves its box to the side, runs between the rows to the border of its column,
// up or down in the gutter, and between the rows of the target's column to its box.
//
// page_data.py defines the data. This script does not depend on a page.
"use strict";
const layout = (() => {
  const GAP = 34; // between two rows
  const SIDE = 26, BESIDE = 16, LINES = 11; // between two boxes, a box and a line, two lines
  const PAD = 16, HEAD = 30; // between a frame and its contents; the height of a frame's name
  const MARGIN = 24, COLUMN_HEAD = 34;
  const LABEL = 14, SPREAD = 13; // a label's height; between two lines at one side of a box
  const TRACK = 7, GUTTER = 30, MOST_TRACKS = 40, MOST_LABELS = 300;
  const SWEEPS = 7, STILL = 0.2; // the number of sweeps; smaller moves end the sweeps
  const NOTHING = 0.05, SHORT = 1; // shorter steps have no direction; shorter steps are not drawn
  const ROUND = 6;
  const SCREEN = [1800, 1400];
  const NEARLY = 1.75; // maximum size, in screens, of a view that nearly fits
  const HARDLY = 12; // boxes; a smaller fitting view may be replaced by a view that nearly fits
  const LONGEST = 30; // rows that a strand may span; longer arrows are threads
  const ORDERINGS = 6, MOST_COUNTED = 3000; // sweeps; places up to which crossings are counted

  const last = (list) => list[list.length - 1];
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const most = (list, least) => list.reduce((a, b) => Math.max(a, b), least);
  const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i);
  const grouped = (list, nameOf) => {
    const groups = new Map();
    for (const item of list) {
      const name = nameOf(item);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(item);
    }
    return groups;
  };

  // --- the graph, and its visible part ------------------------------------------------------

  // Returns the block around each box and block, and the number of its column.
  const nested = (G) => {
    const parent = new Map(), columnOf = new Map();
    const visit = (key, number) => {
      columnOf.set(key, number);
      for (const child of G.items[key].children || []) {
        parent.set(child, key);
        visit(child, number);
      }
    };
    G.columns.forEach(visit);
    return { parent, columnOf };
  };
  const around = (graph, key) => {
    const found = [];
    while (graph.parent.has(key)) { key = graph.parent.get(key); found.push(key); }
    return found;
  };
  // Returns the drawn item for a box: the box itself, or the outermost closed block around it.
  const standing = (graph, opened, key) => {
    const { G } = graph;
    const closed = around(graph, key).filter((b) => !G.columns.includes(b) && !opened.has(b));
    return closed.length ? last(closed) : key;
  };
  const merged = (arrows) => arrows.length === 1 ? arrows[0] : {
    source: arrows[0].source, target: arrows[0].target,
    values: [...new Set(arrows.flatMap((a) => a.values))].sort((a, b) => a - b),
    saved: arrows.every((a) => a.saved),
    strength: most(arrows.map((a) => a.strength), 0),
    ...(arrows.every((a) => a.cut) ? { cut: arrows[0].cut, cutWidth: arrows[0].cutWidth }
      : { cut: null, cutWidth: 0 }),
  };
  const seenThreads = (graph, opened) => {
    const seen = graph.threads.map((number) => {
      const arrow = graph.G.arrows[number];
      return { ...arrow, source: standing(graph, opened, arrow.source),
        target: standing(graph, opened, arrow.target) };
    }).filter((arrow) => arrow.source !== arrow.target);
    return [...grouped(seen, (a) => `${a.source} ${a.target} ${a.saved}`).values()].map(merged);
  };
  const sizeText = (bytes) => {
    if (bytes < 1000) return `${bytes} B`;
    for (const unit of ["kB", "MB", "GB", "TB"]) {
      bytes /= 1000;
      if (bytes < 999.5 || unit === "TB") {
        return `${bytes < 9.95 ? bytes.toFixed(1) : bytes.toFixed(0)} ${unit}`;
      }
      bytes = Math.round(bytes);
    }
  };

  // --- isotonic regression ------------------------------------------------------------------

  // Returns the nondecreasing numbers nearest to `wanted`, by pooling adjacent violators.
  const pooled = (wanted, weights) => {
    const means = [], masses = [], counts = [];
    wanted.forEach((mean, i) => {
      let mass = weights[i], count = 1;
      while (means.length && last(means) >= mean) {
        const other = masses.pop();
        mean = (means.pop() * other + mean * mass) / (other + mass);
        mass += other;
        count += counts.pop();
      }
      means.push(mean); masses.push(mass); counts.push(count);
    });
    return means.flatMap((mean, i) => Array(counts[i]).fill(mean));
  };
  // Moves the tops of rows near to the wanted tops, without reducing the distances of rows.
  const rowsNear = (tops, wanted) => {
    const pulls = tops.map(() => []);
    for (const [row, top] of wanted) pulls[row].push(top - tops[row]);
    let shift = 0;
    const known = [], weights = [];
    for (const pull of pulls) {
      if (pull.length) shift = sum(pull) / pull.length;
      known.push(shift);
      weights.push(pull.length ? 1 : 0.001);
    }
    return pooled(known, weights).map((move, i) => tops[i] + move);
  };

  // --- rows, places and their order ---------------------------------------------------------

  // Returns the level of each block (rows of places, the child or -1 at each place, strands with
  // their places and arrows, ports by outside block and strand number), and the threads.
  const arranged = (graph) => {
    const { G, parent } = graph;
    const blocks = [...G.columns, ...parent.keys()].filter((key) => G.items[key].children);
    const order = new Map(blocks.flatMap((b) => G.items[b].children.map((key, i) => [key, i])));
    const journeys = G.arrows.map((arrow) => journeyOf(graph, order, arrow));
    const drafts = new Map(blocks.map((key) => [key, { children: G.items[key].children, pairs: [],
      strands: new Map() }]));
    for (const journey of journeys) {
      if (journey) drafts.get(journey.block).pairs.push([last(journey.up), last(journey.down)]);
    }
    for (const draft of drafts.values()) {
      draft.ranks = ranksOf(draft.children, draft.pairs);
      draft.last = most([...draft.ranks.values()], 0);
    }
    const threads = [];
    journeys.forEach((journey, number) => {
      if (!journey || isLong(drafts, journey)) threads.push(number);
      else lay(drafts, journey, number);
    });
    const levels = Object.fromEntries([...drafts].map(([key, draft]) => [key, levelOf(draft)]));
    return { levels, threads };
  };
  // Returns the innermost block around both ends of an arrow, and the path from each box up to a
  // child of this block; null for arrows between columns, or against the order of the program.
  const journeyOf = (graph, order, { source, target }) => {
    const up = [source, ...around(graph, source)], down = [target, ...around(graph, target)];
    if (last(up) !== last(down)) return null;
    let block;
    while (up.length > 1 && down.length > 1 && last(up) === last(down)) {
      block = up.pop();
      down.pop();
    }
    return order.get(last(up)) < order.get(last(down)) ? { block, up, down } : null;
  };
  const isLong = (drafts, { block, up, down }) => {
    const rank = (of, key) => drafts.get(of).ranks.get(key);
    const spans = [rank(block, last(down)) - rank(block, last(up))];
    for (let i = 1; i < up.length; i++) spans.push(drafts.get(up[i]).last - rank(up[i], up[i - 1]));
    for (let i = 1; i < down.length; i++) spans.push(rank(down[i], down[i - 1]));
    return most(spans, 0) > LONGEST;
  };
  // Adds an arrow to its strand in the common block, and to strands in blocks at its ends.
  const lay = (drafts, { block, up, down }, arrow) => {
    const strand = (key, source, target) => {
      const { strands } = drafts.get(key), name = `${source} to ${target}`;
      if (!strands.has(name)) strands.set(name, { number: strands.size, source, target, arrows: [] });
      strands.get(name).arrows.push(arrow);
      return strands.get(name).number;
    };
    const common = strand(block, `item ${last(up)}`, `item ${last(down)}`);
    let port = `${block} ${common}`;
    for (let i = up.length - 1; i > 0; i--) {
      port = `${up[i]} ${strand(up[i], `item ${up[i - 1]}`, `out ${port}`)}`;
    }
    port = `${block} ${common}`;
    for (let i = down.length - 1; i > 0; i--) {
      port = `${down[i]} ${strand(down[i], `in ${port}`, `item ${down[i - 1]}`)}`;
    }
  };
  // Returns the row of each child: the first row below its inputs that is not full. Children
  // without inputs are placed just above their first reader, if the row is not full.
  const ranksOf = (children, pairs) => {
    const before = new Map(children.map((key) => [key, []]));
    const after = new Map(children.map((key) => [key, []]));
    for (const [source, target] of pairs) {
      before.get(target).push(source);
      after.get(source).push(target);
    }
    const room = Math.max(8, Math.floor(Math.sqrt(children.length)));
    const isSource = (key) => !before.get(key).length;
    const ranks = new Map(), downward = rowsOf(room), upward = rowsOf(room); // `upward`: rows <= 0
    for (const key of children) {
      const least = 1 + most(before.get(key).map((other) => ranks.get(other)), 0);
      ranks.set(key, isSource(key) ? 0 : downward.taken(least));
    }
    for (const [key, rank] of ranks) if (!isSource(key)) upward.fill(-rank);
    for (const key of children.filter(isSource)) {
      const readers = after.get(key).map((other) => -ranks.get(other));
      ranks.set(key, -upward.taken(readers.length ? 1 + most(readers, -Infinity) : 0));
    }
    const used = [...new Set(ranks.values())].sort((a, b) => a - b);
    const number = new Map(used.map((rank, i) => [rank, i]));
    return new Map([...ranks].map(([key, rank]) => [key, number.get(rank)]));
  };
  // Makes rows of `room` places; `taken` returns the first row, from a given row on, that is not
  // full, and takes a place in this row. Path compression skips full rows.
  const rowsOf = (room) => {
    const filled = new Map(), next = new Map();
    const fill = (row) => filled.set(row, (filled.get(row) || 0) + 1);
    const taken = (row) => {
      const full = [];
      while ((filled.get(row) || 0) >= room) {
        full.push(row);
        row = next.has(row) ? next.get(row) : row + 1;
      }
      for (const other of full) next.set(other, row);
      fill(row);
      return row;
    };
    return { fill, taken };
  };
  const levelOf = ({ children, ranks, last: lowest, strands }) => {
    const items = [], rows = range(0, lowest + 3).map(() => []), ends = new Map();
    const made = (row, item = -1) => {
      rows[row].push(items.length);
      return items.push(item) - 1;
    };
    for (const key of children) {
      const row = ranks.get(key) + 1;
      ends.set(`item ${key}`, [made(row, key), row]);
    }
    const endOf = (name) => {
      const row = name.startsWith("in") ? 0 : lowest + 2;
      if (!ends.has(name)) ends.set(name, [made(row), row]);
      return ends.get(name);
    };
    const lines = [...strands.values()].map(({ source, target, arrows }) => {
      const [first, from] = endOf(source), [end, to] = endOf(target);
      return [[first, ...range(from + 1, to).map((row) => made(row)), end], arrows];
    });
    const ports = (kind) => Object.fromEntries([...ends].filter(([name]) => name.startsWith(kind))
      .map(([name, [place]]) => [name.slice(kind.length), place]));
    return { rows: ordered(rows, lines, items.length), items, strands: lines,
      in: ports("in "), out: ports("out ") };
  };
  // Reorders the places in rows to reduce crossings.
  const ordered = (rows, lines, count) => {
    if (most(rows.map((row) => row.length), 0) < 2) return rows;
    const above = range(0, count).map(() => []), below = range(0, count).map(() => []);
    for (const [places] of lines) {
      for (let i = 1; i < places.length; i++) {
        above[places[i]].push(places[i - 1]);
        below[places[i - 1]].push(places[i]);
      }
    }
    const counted = count <= MOST_COUNTED;
    let best = rows, fewest = counted ? crossings(rows, below) : Infinity;
    for (let sweep = 0; sweep < ORDERINGS; sweep++) {
      const falls = sweep % 2 === 0;
      rows = swept(rows, falls ? above : below, falls);
      const crossed = counted ? crossings(rows, below) : -sweep;
      if (crossed < fewest) { best = rows; fewest = crossed; }
    }
    return best;
  };
  // Sorts each row by the mean position of its neighbours in the previous row.
  const swept = (rows, near, falls) => {
    const at = [], sorted = [...rows];
    for (const row of rows) row.forEach((place, i) => { at[place] = i; });
    const numbers = falls ? range(1, rows.length) : range(0, rows.length - 1).reverse();
    for (const r of numbers) {
      const mean = new Map(rows[r].map((place) => [place, near[place].length
        ? sum(near[place].map((other) => at[other])) / near[place].length : at[place]]));
      sorted[r] = [...rows[r]].sort((a, b) => mean.get(a) - mean.get(b));
      sorted[r].forEach((place, i) => { at[place] = i; });
    }
    return sorted;
  };
  // Counts the crossings between neighbouring rows: inversions of the ends of their lines.
  const crossings = (rows, below) => sum(range(1, rows.length).map((r) => {
    const at = new Map(rows[r].map((place, i) => [place, i])), seen = [];
    let total = 0;
    for (const place of rows[r - 1]) {
      for (const end of below[place].map((other) => at.get(other)).sort((a, b) => a - b)) {
        let low = 0, high = seen.length;
        while (low < high) {
          const middle = (low + high) >> 1;
          if (seen[middle] <= end) low = middle + 1; else high = middle;
        }
        total += seen.length - low;
        seen.splice(low, 0, end);
      }
    }
    return total;
  }));

  // --- the inside of a block, in local coordinates; y runs along the flow ---------------------

  const insideOf = (graph, key, opened, flips) => {
    const { G } = graph, level = graph.levels[key], inner = new Map();
    for (const child of G.items[key].children) {
      if (opened.has(child)) inner.set(child, insideOf(graph, child, opened, flips));
    }
    const sizes = level.items.map((k) => {
      const { width, height } = k < 0 ? { width: 0, height: 0 } : inner.get(k) || G.items[k];
      return [width, height];
    });
    const joints = jointsOf(key, level, inner);
    const x = across(level, sizes, joints);
    return stacked(G, key, level, x, sizes, joints.below, inner, flips);
  };
  // Returns the x at which a line enters or leaves an open block, from the block's middle.
  const portOffset = (inner, key, strand, kind) => {
    const inside = inner.get(key);
    return inside ? inside.x[inside.level[kind][strand]] - inside.width / 2 : 0;
  };
  // Lists each place's lines to rows above and below: [other place, own and other offset, weight].
  const jointsOf = (key, level, inner) => {
    const above = level.items.map(() => []), below = level.items.map(() => []);
    level.strands.forEach(([places], number) => {
      for (let i = 0; i + 1 < places.length; i++) {
        const up = places[i], low = places[i + 1];
        const out = portOffset(inner, level.items[up], `${key} ${number}`, "out");
        const into = portOffset(inner, level.items[low], `${key} ${number}`, "in");
        const weight = [1, 3, 12][(level.items[up] < 0) + (level.items[low] < 0)];
        below[up].push([low, out, into, weight]);
        above[low].push([up, into, out, weight]);
      }
    });
    return { above, below, both: above.map((list, i) => list.concat(below[i])) };
  };
  // Computes the middle of each place along its row.
  const across = (level, sizes, { above, below, both }) => {
    const x = level.items.map(() => 0);
    const rooms = level.rows.map((row) => roomsOf(row, level.items, sizes));
    level.rows.forEach((row, r) => row.forEach((place, i) => {
      x[place] = rooms[r][i] - last(rooms[r]) / 2;
    }));
    const down = level.rows.map((_, r) => r), up = [...down].reverse();
    for (let sweep = 0; sweep < 2 * SWEEPS; sweep++) {
      const falls = sweep % 2 === 0;
      const near = sweep > SWEEPS ? both : falls ? above : below;
      let moved = 0;
      for (const r of falls ? down : up) {
        moved = Math.max(moved, settle(x, level.rows[r], rooms[r], near));
      }
      if (moved < STILL && sweep > SWEEPS) break;
    }
    return x;
  };
  // Returns the minimum distance of each place's middle from the middle of the first place.
  const roomsOf = (row, items, sizes) => {
    const found = row.length ? [0] : [];
    for (let i = 1; i < row.length; i++) {
      const passing = (items[row[i - 1]] < 0) + (items[row[i]] < 0);
      const gap = [SIDE, BESIDE, LINES][passing];
      found.push(found[i - 1] + (sizes[row[i - 1]][0] + sizes[row[i]][0]) / 2 + gap);
    }
    return found;
  };
  // Moves a row's places near to their neighbours, subject to order; returns the largest move.
  const settle = (x, row, room, near) => {
    const wanted = [], weights = [];
    row.forEach((place, i) => {
      let total = 0.02, pull = 0.02 * x[place];
      for (const [other, own, its, weight] of near[place]) {
        total += weight;
        pull += weight * (x[other] + its - own);
      }
      wanted.push(pull / total - room[i]);
      weights.push(total);
    });
    let moved = 0;
    pooled(wanted, weights).forEach((level, i) => {
      moved = Math.max(moved, Math.abs(x[row[i]] - level - room[i]));
      x[row[i]] = level + room[i];
    });
    return moved;
  };
  // Stacks the rows, and places the name in the frame between the lines.
  const stacked = (G, key, level, x, sizes, below, inner, flips) => {
    const bare = G.columns.includes(key), rowOf = [], placeOf = new Map();
    level.rows.forEach((row, r) => row.forEach((place) => { rowOf[place] = r; }));
    level.items.forEach((k, place) => { if (k >= 0) placeOf.set(k, place); });
    const heights = level.rows.map((row) => most(row.map((place) => sizes[place][1]), 0));
    if (!bare) heights[flips ? heights.length - 1 : 0] = HEAD - 6; // lines go past the name
    const tops = topsOf(level, x, heights, below);
    const span = spanOf(x, sizes);
    const { left, width, nameX } = bare ? { ...span, nameX: 0 }
      : framed(G.items[key].nameWidth, flips ? level.out : level.in, x, span);
    return {
      key, level, x: x.map((middle) => middle - left), rowOf, placeOf, tops, heights, width,
      height: last(tops) + last(heights), nameX, inner, sizes,
      end(row) { return this.tops[row] + this.heights[row]; },
    };
  };
  const spanOf = (x, sizes) => {
    if (!x.length) return { left: 0, width: 0 };
    const left = -most(x.map((m, i) => sizes[i][0] / 2 - m), -Infinity);
    return { left, width: most(x.map((m, i) => m + sizes[i][0] / 2), -Infinity) - left };
  };
  // Returns the top of each row; the first and last row contain ports and lie on the frame.
  const topsOf = (level, x, heights, below) => {
    const tops = [0], count = level.rows.length;
    for (let r = 0; r + 1 < count; r++) {
      const reach = level.rows[r].flatMap((p) =>
        below[p].map(([q, own, its]) => Math.abs(x[p] + own - x[q] - its)));
      const ends = r === 0 || r === count - 2;
      const gap = reach.length ? (ends ? PAD : GAP) + Math.min(46, 0.08 * most(reach, 0))
        : ends ? PAD / 2 : GAP;
      tops.push(tops[r] + heights[r] + gap);
    }
    return tops;
  };
  // Returns a frame's left side and width, and a position of its name between the lines.
  const framed = (nameWidth, ports, x, span) => {
    const need = nameWidth + 2 * BESIDE, left = span.left - PAD;
    const width = Math.max(span.width + 2 * PAD, need);
    const stops = Object.values(ports).map((place) => x[place] - left).sort((a, b) => a - b);
    let start = 0;
    for (const stop of [...stops, width]) {
      if (stop - start >= need) return { left, width, nameX: start + BESIDE };
      start = stop;
    }
    const wider = need - stops[0];
    return { left: left - wider, width: width + wider, nameX: BESIDE };
  };

  // --- the page: columns side by side, in the page's coordinates ------------------------------

  // Makes the inside of an open block on the page; `spot` is the block's position, if any.
  const stageOf = (inside, x, y, flips, spot) => ({
    inside, x, y, flips, spot, channels: new Map(), lanes: new Map(),
    at(along) { return this.y + (this.flips ? this.inside.height - along : along); },
    middle(place) { return this.x + this.inside.x[place]; },
  });

  // Returns the row, and the middle on the page, of each box and block in a column.
  const middlesOf = (column) => {
    const found = new Map();
    const visit = (stage, key, place, row) => {
      const { inside } = stage, r = inside.rowOf[place];
      const middle = stage.at(inside.tops[r] + inside.heights[r] / 2);
      found.set(key, [row, middle]);
      const within = inside.inner.get(key);
      if (!within) return;
      const below = stageOf(within, 0, middle - inside.sizes[place][1] / 2, stage.flips, null);
      for (const [child, at] of within.placeOf) visit(below, child, at, row);
    };
    for (const [key, place] of column.inside.placeOf) {
      visit(column, key, place, column.inside.rowOf[place]);
    }
    return found;
  };
  const moveRows = (stage, pulls) => {
    const { inside } = stage;
    const rows = inside.tops.map((_, r) => r);
    if (stage.flips) rows.reverse();
    const edges = rows.map((r) => stage.at(stage.flips ? inside.end(r) : inside.tops[r]));
    const number = new Map(rows.map((r, i) => [r, i]));
    const moved = rowsNear(edges, pulls.map(([r, move]) =>
      [number.get(r), edges[number.get(r)] + move]));
    const top = Math.min(stage.y, moved[0]);
    const bottom = most(moved.map((m, i) => m + inside.heights[rows[i]]), -Infinity);
    stage.y = top;
    inside.height = bottom - top;
    rows.forEach((r, i) => {
      inside.tops[r] = stage.flips ? bottom - moved[i] - inside.heights[r] : moved[i] - top;
    });
  };
  // Moves each column's rows near to the rows to which `ties` connect them in earlier columns.
  const align = (columns, ties) => {
    const middles = columns.map(middlesOf);
    const near = (number, others) => {
      const own = middles[number], known = new Map(), pulls = [];
      for (const k of others) {
        if (k !== number) for (const [key, [, y]] of middles[k]) known.set(key, y);
      }
      for (const [one, two] of ties) {
        if (own.has(one) && known.has(two)) {
          pulls.push([own.get(one)[0], known.get(two) - own.get(one)[1]]);
        } else if (own.has(two) && known.has(one)) {
          pulls.push([own.get(two)[0], known.get(one) - own.get(two)[1]]);
        }
      }
      if (!pulls.length) return;
      moveRows(columns[number], pulls);
      middles[number] = middlesOf(columns[number]);
    };
    const all = range(0, columns.length);
    for (const number of all.slice(1)) near(number, all.slice(0, number));
  };
  // Places the items of a stage and of its inner stages on the page.
  const put = (stage, column, depth, page) => {
    page.stages.push(stage);
    const { inside } = stage;
    for (const [key, place] of inside.placeOf) {
      const [width, height] = inside.sizes[place], row = inside.rowOf[place];
      const x = stage.middle(place) - width / 2;
      const y = stage.at(inside.tops[row] + inside.heights[row] / 2) - height / 2;
      const spot = { x, y, width, height, column, stage };
      page.spots.set(key, spot);
      const within = inside.inner.get(key);
      if (within) {
        page.frames.push({ key, x, y, width, height, depth, nameX: x + within.nameX });
        put(stageOf(within, x, y, stage.flips, spot), column, depth + 1, page);
      } else {
        page.boxes.push({ key, x, y });
      }
    }
  };

  // --- strands --------------------------------------------------------------------------------

  // Returns the offset from the middle of a box at which each strand begins ("out") or ends ("in").
  const offsetsOf = (inside, kind) => {
    const { level } = inside, offsets = level.strands.map(() => 0);
    const end = (places, i) => places[kind === "out" ? i : places.length - 1 - i];
    const byPlace = grouped(range(0, level.strands.length), (n) => end(level.strands[n][0], 0));
    for (const [place, numbers] of byPlace) {
      const key = level.items[place];
      if (inside.inner.has(key)) {
        for (const n of numbers) {
          offsets[n] = portOffset(inside.inner, key, `${inside.key} ${n}`, kind);
        }
      } else if (key >= 0) {
        const where = (n) => inside.x[end(level.strands[n][0], 1)];
        numbers.sort((a, b) => where(a) - where(b));
        const count = numbers.length, width = inside.sizes[place][0];
        const step = count < 2 ? 0 : Math.min(SPREAD, (width - 20) / (count - 1));
        numbers.forEach((n, i) => { offsets[n] = (i - (count - 1) / 2) * step; });
      }
    }
    return offsets;
  };
  const strandsOf = (G, stage) => {
    const { inside } = stage, { level } = inside;
    const outs = offsetsOf(inside, "out"), intos = offsetsOf(inside, "in");
    return level.strands.map(([places, arrows], number) => {
      const points = places.map((place, i) => passage(stage, place, i === 0));
      points[0][0] += outs[number];
      last(points)[0] += intos[number];
      const target = level.items[last(places)];
      return { steps: smooth(points), arrow: merged(arrows.map((n) => G.arrows[n])),
        head: target >= 0 && !inside.inner.has(target), thread: false };
    });
  };
  // Returns the x of a line at one of its places, and the range of y in which the line is straight.
  const passage = (stage, place, first) => {
    const { inside } = stage, row = inside.rowOf[place];
    let begin = inside.tops[row], end = inside.end(row);
    if (inside.level.items[place] >= 0) {
      const margin = (end - begin - inside.sizes[place][1]) / 2;
      if (first) begin = end - margin; else end = begin + margin;
    }
    return [stage.middle(place), stage.at(begin), stage.at(end)];
  };

  // --- threads --------------------------------------------------------------------------------

  // Returns the threads between visible items, with the columns of the ends, gutters and label.
  const threadsOf = (graph, opened) => seenThreads(graph, opened).map((arrow, id) => {
    const from = graph.columnOf.get(arrow.source), to = graph.columnOf.get(arrow.target);
    const low = Math.min(from, to), high = Math.max(from, to);
    const { bytes: sizes, memory } = graph.G;
    const bytes = sum([...new Map(arrow.values.map((v) => [memory[v], sizes[v]])).values()]);
    const size = arrow.saved ? (bytes ? sizeText(bytes) : graph.G.alive) : "";
    return {
      id, arrow, from, to,
      gutters: range(low + 1, Math.max(low + 2, high + 1)),
      labelsAt: from < to ? to : to + 1,
      text: arrow.cut ? `✕ ${arrow.cut}` : size,
      width: arrow.cut ? arrow.cutWidth : size.length * graph.G.advance,
    };
  });
  // Returns the width of the threads and labels before a column, or after the last column.
  const gutterOf = (threads, number, count) => {
    const crossing = threads.filter((t) => t.gutters.includes(number));
    if (!crossing.length) return number > 0 && number < count ? GUTTER : 0;
    const texts = crossing.filter((t) => t.labelsAt === number).map((t) => t.width + 16);
    return GUTTER + Math.min(crossing.length, MOST_TRACKS) * TRACK + most(texts, 0);
  };
  // Sets the distances from the top of a box at which the threads of the box begin and end.
  const sidesOf = (threads, spots) => {
    const ends = threads.flatMap((t) => [
      { t, key: t.arrow.source, other: t.arrow.target, right: t.from <= t.to, end: "begin" },
      { t, key: t.arrow.target, other: t.arrow.source, right: t.from >= t.to, end: "end" },
    ]);
    for (const list of grouped(ends, (e) => `${e.key} ${e.right}`).values()) {
      const { height } = spots.get(list[0].key);
      const step = Math.min(SPREAD, (height - 10) / list.length);
      list.sort((a, b) => spots.get(a.other).y - spots.get(b.other).y);
      list.forEach(({ t, end }, i) => {
        t[end] = height / 2 + (i - (list.length - 1) / 2) * step;
      });
    }
  };
  // Returns the points of a thread from a box to the border of its column, between the rows.
  const wayOut = (spots, key, side, below) => {
    let at = spots.get(key), current = key, y = at.y + below;
    const border = () => side > 0 ? at.x + at.width : at.x;
    const points = [[border(), y]];
    for (;;) {
      const { stage } = at, { inside } = stage, place = inside.placeOf.get(current);
      const r = inside.rowOf[place], row = inside.level.rows[r], index = row.indexOf(place);
      const beyond = side > 0 ? row.slice(index + 1) : row.slice(0, index);
      if (beyond.some((p) => inside.level.items[p] >= 0)) {
        const x = border() + side * 7;
        points.push([x, y]);
        y = channel(stage, r);
        points.push([x, y]);
      }
      if (!stage.spot) return points;
      current = inside.key;
      at = stage.spot;
    }
  };
  // Returns a free y between a row and the next, before the first (-1) or after the last row (-2).
  const channel = (stage, between) => {
    const isLast = !stage.spot && between === stage.inside.tops.length - 2;
    const row = isLast ? -2 : between, used = stage.channels.get(row) || 0;
    stage.channels.set(row, used + 1);
    if (row < 0) {
      const out = GAP / 4 + used % 7 * LINES / 2;
      return stage.at(row === -1 ? -out : stage.inside.height + out);
    }
    const low = stage.inside.end(row), high = stage.inside.tops[row + 1];
    const share = [0.5, 0.3, 0.7, 0.4, 0.6, 0.2, 0.8][used % 7];
    return stage.at(low + (high - low) * share);
  };
  // Sets each thread's x in each gutter: downward threads come first, lower threads are outermost.
  const tracksOf = (threads, gutters) => gutters.forEach(([left], number) => {
    const here = threads.filter((t) => t.gutters.includes(number));
    const order = (t) => {
      const begin = last(t.start)[1], end = last(t.stop)[1];
      return end > begin ? [0, -begin] : [1, begin];
    };
    here.sort((a, b) => order(a)[0] - order(b)[0] || order(a)[1] - order(b)[1]);
    const step = Math.min(TRACK, TRACK * MOST_TRACKS / Math.max(1, here.length));
    here.forEach((t, i) => { t.tracks[number] = left + GUTTER / 2 + i * step; });
  });
  // Sets the y of each label, near to the entry of its thread and without overlap.
  const levelLabels = (threads, gutters) => gutters.forEach((_, number) => {
    const labeled = threads.filter((t) => t.labelsAt === number && t.text);
    labeled.sort((a, b) => last(a.stop)[1] - last(b.stop)[1]);
    const wanted = labeled.map((t, i) => [i, last(t.stop)[1]]);
    rowsNear(labeled.map((_, i) => i * LABEL), wanted).forEach((y, i) => { labeled[i].level = y; });
  });
  // Returns the y nearest to `y` in a gap between two rows of a column. Each source box has its
  // own y, so the threads of two values never coincide.
  const betweenRows = (stage, y, source) => {
    const { inside } = stage;
    const middle = (r) => stage.at((inside.end(r) + inside.tops[r + 1]) / 2);
    const gaps = range(1, inside.tops.length - 2).map((r) => [r, middle(r)]);
    gaps.push([-1, stage.at(-GAP / 4)], [-2, stage.at(inside.height + GAP / 4)]);
    const [gap] = gaps.reduce((a, b) => Math.abs(b[1] - y) < Math.abs(a[1] - y) ? b : a);
    const lane = `${gap} ${source}`;
    if (!stage.lanes.has(lane)) stage.lanes.set(lane, channel(stage, gap));
    return stage.lanes.get(lane);
  };
  const led = (thread, columns) => {
    const { start, stop, tracks, level, from, to } = thread;
    const numbers = from > to ? [...thread.gutters].reverse() : thread.gutters;
    const points = [...start], entry = last(stop)[1], track = tracks[last(numbers)];
    let y = last(start)[1];
    numbers.forEach((number, i) => {
      points.push([tracks[number], y]);
      if (i + 1 < numbers.length) {
        y = betweenRows(columns[Math.max(number, numbers[i + 1]) - 1], y, thread.arrow.source);
        points.push([tracks[number], y]);
      }
    });
    if (level !== null) points.push([track, level]);
    if (level !== null && from < to) points.push([thread.right - 6, level]);
    points.push([last(points)[0], entry], ...[...stop].reverse());
    return { steps: rounded(points), arrow: thread.arrow, head: true, thread: true };
  };
  // Routes all threads, after all boxes are placed.
  const lead = (threads, { spots, columns, gutters }) => {
    sidesOf(threads, spots);
    for (const t of threads) {
      const { arrow, from, to } = t;
      t.start = wayOut(spots, arrow.source, from <= to ? 1 : -1, t.begin);
      t.stop = wayOut(spots, arrow.target, from < to ? -1 : 1, t.end);
      Object.assign(t, { tracks: {}, level: null, right: gutters[t.labelsAt][1] });
    }
    tracksOf(threads, gutters);
    if (threads.length <= MOST_LABELS) levelLabels(threads, gutters);
    const labels = threads.filter((t) => t.level !== null).map((t) => ({
      x: t.right - 10 - t.width, y: t.level, width: t.width, text: t.text, arrow: t.arrow,
    }));
    return { lines: threads.map((t) => led(t, columns)), labels };
  };

  // --- lines as paths -------------------------------------------------------------------------

  // Draws a line through (x, top, bottom) of each place: straight in rows, curved between rows.
  const smooth = (points) => {
    let [x, top, bottom] = points[0];
    const steps = [["M", [x, top]]];
    if (Math.abs(top - bottom) > NOTHING) steps.push(["L", [x, bottom]]);
    for (const [nextX, from, nextBottom] of points.slice(1)) {
      const nextTop = Math.abs(nextBottom - from) > SHORT ? from : nextBottom;
      const middle = (bottom + nextTop) / 2;
      if (Math.abs(nextX - x) < NOTHING) steps.push(["L", [nextX, nextTop]]);
      else steps.push(["C", [x, middle, nextX, middle, nextX, nextTop]]);
      if (nextTop !== nextBottom) steps.push(["L", [nextX, nextBottom]]);
      x = nextX;
      bottom = nextBottom;
    }
    return steps;
  };
  // Draws a line of horizontal and vertical segments with round corners.
  const rounded = (points) => {
    const far = (a, b) => Math.abs(a[0] - b[0]) + Math.abs(a[1] - b[1]);
    const towards = (a, b, reach) => {
      const length = far(a, b) || 1;
      return [a[0] + (b[0] - a[0]) * reach / length, a[1] + (b[1] - a[1]) * reach / length];
    };
    const kept = [points[0]];
    for (const point of points) if (far(point, last(kept)) > NOTHING) kept.push(point);
    const steps = [["M", kept[0]]];
    for (let i = 1; i + 1 < kept.length; i++) {
      const [before, corner, after] = kept.slice(i - 1, i + 2);
      const reach = Math.min(ROUND, far(before, corner) / 2, far(corner, after) / 2);
      steps.push(["L", towards(corner, before, reach)]);
      steps.push(["C", [...corner, ...corner, ...towards(corner, after, reach)]]);
    }
    steps.push(["L", last(kept)]);
    return steps;
  };

  // --- the whole page -------------------------------------------------------------------------

  // Places the columns from left to right, with gutters around them, and their boxes and frames.
  const setOut = (graph, opened, threads) => {
    const { G } = graph, count = G.columns.length;
    const columns = G.columns.map((key) => {
      const flips = G.items[key].phase % 2 === 1;
      return stageOf(insideOf(graph, key, opened, flips), 0, MARGIN + COLUMN_HEAD, flips, null);
    });
    align(columns, threads.map(({ arrow }) => [arrow.source, arrow.target]));
    const page = { columns, boxes: [], frames: [], stages: [], spots: new Map(), gutters: [] };
    let x = MARGIN;
    for (const number of range(0, count + 1)) {
      const width = gutterOf(threads, number, count);
      page.gutters.push([x, x + width]);
      if (number === count) break;
      const stage = columns[number];
      stage.x = x + width;
      put(stage, number, 0, page);
      x = stage.x + Math.max(stage.inside.width, G.items[stage.inside.key].nameWidth + 30);
    }
    return page;
  };
  // Returns the extent of the page, including the names of the columns at the top.
  const extent = (page, lines, labels) => {
    const ys = [...page.spots.values()].flatMap((spot) => [spot.y, spot.y + spot.height]);
    for (const line of lines) if (line.thread) ys.push(...line.steps.map((step) => last(step[1])));
    for (const label of labels) ys.push(label.y - LABEL / 2, label.y + LABEL / 2);
    if (!ys.length) ys.push(0);
    const top = -most(ys.map((y) => -y), -Infinity) - COLUMN_HEAD - MARGIN;
    const height = most(ys, -Infinity) + MARGIN - top;
    return { top, width: last(page.gutters)[1] + MARGIN, height };
  };
  const graphs = new WeakMap();
  const graphOf = (G) => {
    if (!graphs.has(G)) {
      const graph = { G, ...nested(G) };
      graphs.set(G, { ...graph, ...arranged(graph) });
    }
    return graphs.get(G);
  };

  // Returns the boxes, frames, lines, labels and headings of the data G with their positions.
  const layout = (G, opened) => {
    const graph = graphOf(G), threads = threadsOf(graph, opened);
    const page = setOut(graph, opened, threads), { boxes, frames, spots } = page;
    const threaded = lead(threads, page);
    const lines = page.stages.flatMap((stage) => strandsOf(G, stage)).concat(threaded.lines);
    const size = extent(page, lines, threaded.labels);
    const headings = G.columns.map((key, i) =>
      ({ key, x: page.gutters[i][1], y: size.top + MARGIN + 8 }));
    return { boxes, frames, lines, labels: threaded.labels, headings, spots, ...size };
  };
  // Returns the first of the data's views that fits on one screen, with its picture. If this view
  // has few boxes, returns the first view that nearly fits if it has at least twice as many boxes.
  const fitted = (G) => {
    let nearly = null, shown = null;
    for (const view of G.views) {
      const opened = new Set(view), picture = layout(G, opened);
      shown = { opened, picture };
      const screens = Math.max(picture.width / SCREEN[0], picture.height / SCREEN[1]);
      if (screens <= NEARLY && !nearly) nearly = shown;
      if (screens <= 1) break;
    }
    const count = (view) => view.picture.boxes.length;
    const more = nearly && count(shown) < HARDLY && count(nearly) >= 2 * count(shown);
    return more ? nearly : shown;
  };
  const seenAs = (G, opened, key) => standing(graphOf(G), opened, key);
  const blocksAround = (G, key) =>
    around(graphOf(G), key).filter((block) => !G.columns.includes(block));
  return { layout, fitted, graphOf, seenAs, blocksAround, sizeText, pooled, rowsNear, MARGIN, LABEL };
})();
