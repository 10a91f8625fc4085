// The page's own hands: lays the graph out again whenever a block opens or closes.
//
// Rows and order come from Python (arrange.py). What is here follows layout.py, picture.py and
// drawing.py step by step, under the same names: change both.
"use strict";
(() => {
  const G = JSON.parse(document.getElementById("graph").textContent);
  const GAP = 34, SIDE = 26, BESIDE = 16, LINES = 11, PAD = 16, HEAD = 30;
  const MARGIN = 24, COLUMN_HEAD = 34, LABEL = 14, TRACK = 7, GUTTER = 30, SPREAD = 13;
  const MOST_TRACKS = 40, MOST_LABELS = 300, SWEEPS = 7, LINE = 11, ADVANCE = 0.615, LEGIBLE = 0.62,
    STILL = 0.2, NOTHING = 0.05;
  const parent = new Map(), columnOf = new Map();
  const opened = new Set(G.opened);
  const item = (key) => G.items[key];
  const isBlock = (key) => item(key).children !== undefined;

  G.columns.forEach((column, number) => {
    const visit = (key) => {
      columnOf.set(key, number);
      for (const child of item(key).children || []) { parent.set(child, key); visit(child); }
    };
    visit(column);
  });

  // --- what is seen -----------------------------------------------------------------------

  const around = (key) => {
    const found = [];
    while (parent.has(key)) { key = parent.get(key); found.push(key); }
    return found;
  };
  const standing = (key) => {
    let seen = key;
    for (const block of around(key)) {
      if (!G.columns.includes(block) && !opened.has(block)) seen = block;
    }
    return seen;
  };
  const merged = (arrows) => ({
    source: arrows[0].source, target: arrows[0].target,
    values: [...new Set(arrows.flatMap((a) => a.values))],
    saved: arrows.every((a) => a.saved),
    strength: Math.max(...arrows.map((a) => a.strength)),
    cut: arrows.every((a) => a.cut) ? arrows[0].cut : null,
  });
  const seenThreads = () => {
    const groups = new Map();
    for (const number of G.threads) {
      const arrow = G.arrows[number];
      const source = standing(arrow.source), target = standing(arrow.target);
      if (source === target) continue;
      const name = `${source} ${target} ${arrow.saved}`;
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push({ ...arrow, source, target });
    }
    return [...groups.values()].map(merged);
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
  const bytesOf = (values) => values.reduce((sum, v) => sum + G.bytes[v], 0);
  const textWidth = (text, size) => {
    let width = 0;
    for (const letter of text) width += letter.codePointAt(0) < 128 ? ADVANCE : 1.05;
    return width * size;
  };

  // --- layout.py --------------------------------------------------------------------------

  const pooled = (wanted, weights) => {
    const means = [], masses = [], counts = [];
    wanted.forEach((mean, i) => {
      let mass = weights[i], count = 1;
      while (means.length && means[means.length - 1] >= mean) {
        const other = masses.pop();
        mean = (means.pop() * other + mean * mass) / (other + mass);
        mass += other;
        count += counts.pop();
      }
      means.push(mean); masses.push(mass); counts.push(count);
    });
    return means.flatMap((mean, i) => Array(counts[i]).fill(mean));
  };
  const rowsNear = (tops, wanted) => {
    const pulls = tops.map(() => []);
    for (const [row, top] of wanted) pulls[row].push(top - tops[row]);
    let shift = 0;
    const known = [], weights = [];
    for (const pull of pulls) {
      if (pull.length) shift = pull.reduce((a, b) => a + b) / pull.length;
      known.push(shift); weights.push(pull.length ? 1 : 0.001);
    }
    return pooled(known, weights).map((move, i) => tops[i] + move);
  };
  const portOffset = (inner, key, name, kind) => {
    const inside = inner.get(key);
    return inside ? inside.x[inside.level[kind][name]] - inside.width / 2 : 0;
  };
  const insideOf = (key, flips) => {
    const level = G.levels[key], inner = new Map(), block = item(key);
    for (const child of block.children) {
      if (opened.has(child)) inner.set(child, insideOf(child, flips));
    }
    const sizes = level.items.map((k) => {
      if (k < 0) return [0, 0];
      const it = inner.get(k) || item(k);
      return [it.width, it.height];
    });
    const above = level.items.map(() => []), below = level.items.map(() => []);
    level.strands.forEach(([places], number) => {
      for (let i = 0; i + 1 < places.length; i++) {
        const [up, low] = [places[i], places[i + 1]];
        const out = portOffset(inner, level.items[up], `${key} ${number}`, "out");
        const into = portOffset(inner, level.items[low], `${key} ${number}`, "in");
        const weight = [1, 3, 12][(level.items[up] < 0) + (level.items[low] < 0)];
        below[up].push([low, out, into, weight]);
        above[low].push([up, into, out, weight]);
      }
    });
    const x = across(level, sizes, above, below);
    return stacked(key, level, x, sizes, below, inner, flips);
  };
  const across = (level, sizes, above, below) => {
    const x = level.items.map(() => 0);
    const rooms = level.rows.map((row) => {
      const found = row.length ? [0] : [];
      for (let i = 1; i < row.length; i++) {
        const passing = (level.items[row[i - 1]] < 0) + (level.items[row[i]] < 0);
        const gap = [SIDE, BESIDE, LINES][passing];
        found.push(found[i - 1] + (sizes[row[i - 1]][0] + sizes[row[i]][0]) / 2 + gap);
      }
      return found;
    });
    level.rows.forEach((row, r) => {
      const middle = row.length ? rooms[r][row.length - 1] / 2 : 0;
      row.forEach((place, i) => { x[place] = rooms[r][i] - middle; });
    });
    const both = above.map((list, i) => list.concat(below[i]));
    for (let sweep = 0; sweep < 2 * SWEEPS; sweep++) {
      const down = sweep % 2 === 0;
      const near = sweep > SWEEPS ? both : down ? above : below;
      let moved = 0;
      for (let i = 0; i < level.rows.length; i++) {
        const r = down ? i : level.rows.length - 1 - i;
        moved = Math.max(moved, settle(x, level.rows[r], rooms[r], near));
      }
      if (moved < STILL && sweep > SWEEPS) break;
    }
    return x;
  };
  const settle = (x, row, room, near) => {
    const wanted = [], weights = [];
    row.forEach((place, i) => {
      let total = 0.02, pull = 0.02 * x[place];
      for (const [other, own, its, weight] of near[place]) {
        total += weight;
        pull += weight * (x[other] + its - own);
      }
      wanted.push(pull / total - room[i]); weights.push(total);
    });
    let moved = 0;
    pooled(wanted, weights).forEach((level, i) => {
      moved = Math.max(moved, Math.abs(x[row[i]] - level - room[i]));
      x[row[i]] = level + room[i];
    });
    return moved;
  };
  const stacked = (key, level, x, sizes, below, inner, flips) => {
    const bare = G.columns.includes(key), count = level.rows.length;
    const rowOf = [];
    level.rows.forEach((row, r) => row.forEach((place) => { rowOf[place] = r; }));
    const heights = level.rows.map((row) => Math.max(0, ...row.map((p) => sizes[p][1])));
    if (!bare) heights[flips ? count - 1 : 0] = HEAD - 6;
    const tops = [0];
    for (let r = 0; r + 1 < count; r++) {
      const reach = level.rows[r].flatMap((p) =>
        below[p].map(([q, own, its]) => Math.abs(x[p] + own - x[q] - its)));
      const ends = r === 0 || r === count - 2, least = ends ? PAD : GAP;
      const gap = reach.length ? least + Math.min(46, 0.08 * Math.max(...reach))
        : ends ? PAD / 2 : GAP;
      tops.push(tops[r] + heights[r] + gap);
    }
    const height = tops[count - 1] + heights[count - 1];
    let left = Math.min(...x.map((m, i) => m - sizes[i][0] / 2));
    let width = Math.max(...x.map((m, i) => m + sizes[i][0] / 2)) - left;
    if (!x.length) { left = 0; width = 0; }
    let nameX = 0;
    if (!bare) {
      const need = item(key).nameWidth + 2 * BESIDE;
      left -= PAD;
      width = Math.max(width + 2 * PAD, need);
      const stops = Object.values(flips ? level.out : level.in).map((p) => x[p] - left);
      stops.sort((a, b) => a - b);
      let start = 0, found = false;
      for (const stop of [...stops, width]) {
        if (stop - start >= need) { found = true; break; }
        start = stop;
      }
      nameX = start + BESIDE;
      if (!found) {
        const wider = need - stops[0];
        left -= wider; width += wider; nameX = BESIDE;
      }
    }
    const placeOf = new Map();
    level.items.forEach((k, place) => { if (k >= 0) placeOf.set(k, place); });
    return {
      key, level, x: x.map((m) => m - left), rowOf, tops, heights, width, height, nameX,
      inner, sizes, placeOf, end(r) { return this.tops[r] + this.heights[r]; },
    };
  };

  // --- picture.py -------------------------------------------------------------------------

  const stageOf = (inside, x, y, flips, spot) => ({
    inside, x, y, flips, spot, channels: new Map(),
    at(along) { return this.y + (this.flips ? this.inside.height - along : along); },
    middle(place) { return this.x + this.inside.x[place]; },
  });

  const draft = () => {
    const threads = seenThreads();
    const spots = new Map(), stages = [], boxes = [], frames = [], lines = [], labels = [];
    const gutters = [];
    const ends = (t) => [columnOf.get(t.source), columnOf.get(t.target)];
    const guttersOf = (t) => {
      const [a, b] = ends(t), low = Math.min(a, b), high = Math.max(a, b);
      if (low === high) return [low + 1];
      return Array.from({ length: high - low }, (_, i) => low + 1 + i);
    };
    const labelsAt = (t) => { const [a, b] = ends(t); return a < b ? b : b + 1; };
    const labelText = (t) => t.cut ? `✕ ${t.cut}` : t.saved ? sizeText(bytesOf(t.values)) : "";
    const gutter = (number, x) => {
      const crossing = threads.filter((t) => guttersOf(t).includes(number));
      const texts = crossing.filter((t) => labelsAt(t) === number).map(labelText);
      const room = Math.max(0, ...texts.map((text) => textWidth(text, LINE) + 16));
      const tracks = Math.min(crossing.length, MOST_TRACKS) * TRACK;
      const between = number > 0 && number < G.columns.length;
      const width = crossing.length ? GUTTER + tracks + room : between ? GUTTER : 0;
      gutters.push([x, x + width]);
      return x + width;
    };
    const heightsIn = (inside, key, stage, place, found, row) => {
      const r = inside.rowOf[place];
      const middle = stage.at(inside.tops[r] + inside.heights[r] / 2);
      found.set(key, [row, middle]);
      if (inside.inner.has(key)) {
        const within = inside.inner.get(key);
        const below = stageOf(within, 0, middle - inside.sizes[place][1] / 2, stage.flips, null);
        for (const [child, at] of within.placeOf) heightsIn(within, child, below, at, found, row);
      }
    };
    const moveRows = (stage, pulls) => {
      const inside = stage.inside, count = inside.tops.length;
      const rows = Array.from({ length: count }, (_, i) => stage.flips ? count - 1 - i : i);
      const edges = rows.map((r) => stage.at(stage.flips ? inside.end(r) : inside.tops[r]));
      const number = new Map(rows.map((r, i) => [r, i]));
      const moved = rowsNear(edges, pulls.map(([r, move]) =>
        [number.get(r), edges[number.get(r)] + move]));
      const top = Math.min(stage.y, moved[0]);
      const bottom = Math.max(...moved.map((m, i) => m + inside.heights[rows[i]]));
      stage.y = top;
      inside.height = bottom - top;
      rows.forEach((r, i) => {
        inside.tops[r] = stage.flips ? bottom - moved[i] - inside.heights[r] : moved[i] - top;
      });
    };
    const put = (stage, column, depth) => {
      stages.push(stage);
      const inside = stage.inside;
      for (const [key, place] of inside.placeOf) {
        const [width, height] = inside.sizes[place], row = inside.rowOf[place];
        const y = stage.at(inside.tops[row] + inside.heights[row] / 2) - height / 2;
        const spot = { x: stage.middle(place) - width / 2, y, width, height, column, stage };
        spots.set(key, spot);
        if (inside.inner.has(key)) {
          const within = inside.inner.get(key);
          frames.push({ key, x: spot.x, y, width, height, depth, nameX: spot.x + within.nameX });
          put(stageOf(within, spot.x, y, stage.flips, spot), column, depth + 1);
        } else {
          boxes.push({ key, x: spot.x, y });
        }
      }
    };
    const columns = G.columns.map((column) => {
      const flips = item(column).phase % 2 === 1;
      return stageOf(insideOf(column, flips), 0, MARGIN + COLUMN_HEAD, flips, null);
    });
    const middlesOf = (stage) => {
      const found = new Map(), inside = stage.inside;
      for (const [key, place] of inside.placeOf) {
        heightsIn(inside, key, stage, place, found, inside.rowOf[place]);
      }
      return found;
    };
    const middles = columns.map(middlesOf);
    const ties = threads.map((t) => [t.source, t.target]).concat(
      G.ties.map(([one, two]) => [standing(one), standing(two)]));
    const align = (number, others) => {
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
    const all = columns.map((_, number) => number);
    for (const number of all.slice(1)) align(number, all.slice(0, number));
    if (G.ties.length) for (const number of all) align(number, all);
    let x = MARGIN;
    columns.forEach((stage, number) => {
      stage.x = x = gutter(number, x);
      put(stage, number, 0);
      x += Math.max(stage.inside.width, textWidth(item(stage.inside.key).name, LINE) + 30);
    });
    gutter(G.columns.length, x);

    // strands
    const spread = (stage) => {
      const inside = stage.inside, level = inside.level;
      const found = [["out", 0, 1], ["in", -1, -2]].map(([kind, end, near]) => {
        const offsets = level.strands.map(() => 0), at = new Map();
        const pick = (places, i) => places[i < 0 ? places.length + i : i];
        level.strands.forEach(([places], number) => {
          const place = pick(places, end);
          if (!at.has(place)) at.set(place, []);
          at.get(place).push(number);
        });
        for (const [place, numbers] of at) {
          const key = level.items[place];
          if (inside.inner.has(key)) {
            for (const n of numbers) {
              offsets[n] = portOffset(inside.inner, key, `${inside.key} ${n}`, kind);
            }
          } else if (key >= 0) {
            const where = (n) => inside.x[pick(level.strands[n][0], near)];
            numbers.sort((a, b) => where(a) - where(b));
            const width = inside.sizes[place][0], count = numbers.length;
            const step = count < 2 ? 0 : Math.min(SPREAD, (width - 20) / (count - 1));
            numbers.forEach((n, i) => { offsets[n] = (i - (count - 1) / 2) * step; });
          }
        }
        return offsets;
      });
      return found;
    };
    for (const stage of stages) {
      const inside = stage.inside, level = inside.level;
      const [outs, intos] = spread(stage);
      level.strands.forEach(([places, arrows], number) => {
        const points = places.map((place, i) => {
          const row = inside.rowOf[place];
          let begin = inside.tops[row], end = inside.end(row);
          if (level.items[place] >= 0) {
            const margin = (end - begin - inside.sizes[place][1]) / 2;
            if (i === 0) begin = end - margin; else end = begin + margin;
          }
          return [stage.middle(place), stage.at(begin), stage.at(end)];
        });
        points[0][0] += outs[number];
        points[points.length - 1][0] += intos[number];
        const target = level.items[places[places.length - 1]];
        const arrow = merged(arrows.map((n) => G.arrows[n]));
        lines.push({ steps: smooth(points), arrow, head: target >= 0 && !inside.inner.has(target) });
      });
    }

    // threads
    const sides = new Map();
    threads.forEach((t, id) => {
      const [source, target] = ends(t);
      for (const [key, other, right, out] of [
        [t.source, t.target, source <= target, true], [t.target, t.source, source >= target, false],
      ]) {
        const name = `${key} ${right}`;
        if (!sides.has(name)) sides.set(name, [key, []]);
        sides.get(name)[1].push([spots.get(other).y, id, out]);
      }
    });
    const outAt = [], inAt = [];
    for (const [key, list] of sides.values()) {
      const height = spots.get(key).height;
      const step = Math.min(SPREAD, (height - 10) / Math.max(1, list.length));
      list.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
      list.forEach(([, id, out], i) => {
        (out ? outAt : inAt)[id] = height / 2 + (i - (list.length - 1) / 2) * step;
      });
    }
    const wayOut = (key, side, yIn) => {
      let at = spots.get(key), current = key, y = at.y + yIn;
      let px = side > 0 ? at.x + at.width : at.x;
      const points = [[px, y]];
      for (;;) {
        const stage = at.stage, inside = stage.inside, place = inside.placeOf.get(current);
        const rowNumber = inside.rowOf[place], row = inside.level.rows[rowNumber];
        const index = row.indexOf(place);
        const beyond = side > 0 ? row.slice(index + 1) : row.slice(0, index);
        if (beyond.some((p) => inside.level.items[p] >= 0)) {
          px = (side > 0 ? at.x + at.width : at.x) + side * 7;
          points.push([px, y]);
          const used = stage.channels.get(rowNumber) || 0;
          stage.channels.set(rowNumber, used + 1);
          const low = inside.end(rowNumber), high = inside.tops[rowNumber + 1];
          const share = [0.5, 0.3, 0.7, 0.4, 0.6, 0.2, 0.8][used % 7];
          y = stage.at(low + (high - low) * share);
          points.push([px, y]);
        }
        if (!stage.spot) return points;
        current = inside.key; at = stage.spot;
      }
    };
    const plans = threads.map((t, id) => {
      const [source, target] = ends(t);
      return {
        t, id, start: wayOut(t.source, source <= target ? 1 : -1, outAt[id]),
        stop: wayOut(t.target, source < target ? -1 : 1, inAt[id]), tracks: {}, level: null,
      };
    });
    const last = (list) => list[list.length - 1];
    gutters.forEach(([left], number) => {
      const here = plans.filter((plan) => guttersOf(plan.t).includes(number));
      const order = (plan) => {
        const begin = last(plan.start)[1], end = last(plan.stop)[1];
        return end > begin ? [0, -begin] : [1, begin];
      };
      here.sort((a, b) => order(a)[0] - order(b)[0] || order(a)[1] - order(b)[1]);
      const step = Math.min(TRACK, TRACK * MOST_TRACKS / Math.max(1, here.length));
      here.forEach((plan, i) => { plan.tracks[number] = left + GUTTER / 2 + i * step; });
      if (plans.length > MOST_LABELS) return;
      const told = plans.filter((plan) => labelsAt(plan.t) === number && labelText(plan.t));
      told.sort((a, b) => last(a.stop)[1] - last(b.stop)[1]);
      const edges = told.map((_, i) => i * LABEL);
      rowsNear(edges, told.map((plan, i) => [i, last(plan.stop)[1]]))
        .forEach((y, i) => { told[i].level = y; });
    });
    const betweenRows = (column, y) => {
      const stage = stages.find((s) => s.inside.key === G.columns[column]), inside = stage.inside;
      const gaps = [stage.at(-GAP / 4), stage.at(inside.height + GAP / 4)];
      for (let r = 1; r < inside.tops.length - 2; r++) {
        gaps.push(stage.at((inside.end(r) + inside.tops[r + 1]) / 2));
      }
      return gaps.reduce((a, b) => Math.abs(b - y) < Math.abs(a - y) ? b : a);
    };
    for (const { t, start, stop, tracks, level } of plans) {
      const numbers = guttersOf(t), [source, target] = ends(t), points = [...start];
      if (source > target) numbers.reverse();
      let y = last(start)[1];
      numbers.forEach((number, i) => {
        points.push([tracks[number], y]);
        if (i + 1 < numbers.length) {
          y = betweenRows(Math.max(number, numbers[i + 1]) - 1, y);
          points.push([tracks[number], y]);
        }
      });
      const entry = last(stop)[1], number = last(numbers);
      if (level !== null) {
        const text = labelText(t), right = gutters[number][1];
        labels.push({ x: right - 10 - textWidth(text, LINE), y: level, text, cut: t.cut, t });
        points.push([tracks[number], level]);
        if (source < target) points.push([right - 6, level]);
        points.push([last(points)[0], entry]);
      } else {
        points.push([tracks[number], entry]);
      }
      points.push(...stop.slice().reverse());
      lines.push({ steps: rounded(points), arrow: t, head: true, thread: true });
    }
    const ys = [0, ...[...spots.values()].flatMap((s) => [s.y, s.y + s.height])];
    if (spots.size) ys.shift();
    for (const line of lines) if (line.thread) ys.push(...line.steps.map((s) => last(s[1])));
    for (const label of labels) ys.push(label.y - LABEL / 2, label.y + LABEL / 2);
    const top = ys.reduce((a, b) => Math.min(a, b)), bottom = ys.reduce((a, b) => Math.max(a, b));
    const pageTop = top - COLUMN_HEAD - MARGIN;
    return {
      boxes, frames, lines, labels, spots, top: pageTop, width: last(gutters)[1] + MARGIN,
      height: bottom + MARGIN - pageTop,
      headings: G.columns.map((key, i) => ({ x: gutters[i][1], y: pageTop + MARGIN + 8, key })),
    };
  };
  const smooth = (points) => {
    let [x, top, bottom] = points[0];
    const steps = [["M", [x, top]]];
    if (Math.abs(top - bottom) > NOTHING) steps.push(["L", [x, bottom]]);
    for (const [nextX, nextTop, nextBottom] of points.slice(1)) {
      const middle = (bottom + nextTop) / 2;
      if (Math.abs(nextX - x) < NOTHING) steps.push(["L", [nextX, nextTop]]);
      else steps.push(["C", [x, middle, nextX, middle, nextX, nextTop]]);
      if (Math.abs(nextBottom - nextTop) > NOTHING) steps.push(["L", [nextX, nextBottom]]);
      x = nextX; bottom = nextBottom;
    }
    return steps;
  };
  const rounded = (points) => {
    const far = (a, b) => Math.abs(a[0] - b[0]) + Math.abs(a[1] - b[1]);
    const towards = (a, b, reach) => {
      const length = far(a, b) || 1;
      return [a[0] + (b[0] - a[0]) * reach / length, a[1] + (b[1] - a[1]) * reach / length];
    };
    const kept = [points[0]];
    for (const p of points) if (far(p, kept[kept.length - 1]) > NOTHING) kept.push(p);
    const steps = [["M", kept[0]]];
    for (let i = 1; i + 1 < kept.length; i++) {
      const [before, corner, after] = kept.slice(i - 1, i + 2);
      const reach = Math.min(6, far(before, corner) / 2, far(corner, after) / 2);
      steps.push(["L", towards(corner, before, reach)]);
      steps.push(["C", [...corner, ...corner, ...towards(corner, after, reach)]]);
    }
    steps.push(["L", kept[kept.length - 1]]);
    return steps;
  };

  // --- drawing.py -------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes = {}, text = null) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    return element;
  };
  const rect = (x, y, width, height, rx, name) =>
    make("rect", { class: name, x, y, width, height, rx });
  const look = (arrow) => {
    if (arrow.cut) return ["edge cut", "acut"];
    const saved = arrow.saved ? " saved" : "", phase = item(arrow.source).phase % 3;
    if (arrow.strength === 2) return ["edge zero", "azero"];
    if (arrow.strength < 2) return [`edge data${saved}`, "adata"];
    return [`edge e${phase}${saved}`, `a${phase}`];
  };
  const drawBox = ({ key, x, y }) => {
    const it = item(key), block = isBlock(key);
    const classes = ["box", `p${it.phase % 3}`, block ? "block" : "",
      !block && it.kind !== "operation" ? `leaf ${it.kind}` : "",
      it.mark ? "marked" : "", it.tint ? "differs" : "", found.has(key) ? "found" : ""];
    const group = make("g", { class: classes.filter(Boolean).join(" "), "data-key": key });
    if (it.hint) group.append(make("title", {}, it.hint));
    if (it.count > 1) group.append(rect(x + 4, y + 4, it.width, it.height, 5, "behind"));
    const leaf = it.kind === "input" || it.kind === "output";
    const radius = leaf ? Math.min(16, it.height / 2) : 5;
    group.append(rect(x, y, it.width, it.height, radius, "card"));
    const middle = x + it.width / 2;
    for (const [text, style, below] of it.rows) {
      if (style === "mark") {
        const width = textWidth(text, LINE) + 10;
        group.append(rect(middle - width / 2, y + below - 10.5, width, 14, 7, "pill"));
      }
      const place = { class: style, x: middle, y: y + below, "text-anchor": "middle" };
      group.append(make("text", place, text));
    }
    if (block) handle(group, key, false);
    else group.addEventListener("click", () => tell(key));
    return group;
  };
  const drawFrame = (frame) => {
    const it = item(frame.key);
    const group = make("g", { class: `frame p${it.phase % 3}`, "data-key": frame.key });
    group.append(rect(frame.x, frame.y, frame.width, frame.height, 8, "around"));
    const tab = make("g", { class: "tab" });
    const width = it.nameWidth + 10;
    tab.append(rect(frame.nameX - 5, frame.y + 5, width, 17, 4, "hot"));
    tab.append(make("text", { class: `h${it.phase % 3}`, x: frame.nameX, y: frame.y + 17 },
      `▾ ${it.short}`));
    handle(tab, frame.key, true);
    group.append(tab);
    return group;
  };
  const handle = (element, key, isOpen) => {
    element.setAttribute("tabindex", "0");
    element.setAttribute("role", "button");
    element.setAttribute("aria-expanded", String(isOpen));
    element.setAttribute("aria-label", `${item(key).name}, ${item(key).rows
      .slice(1).map((row) => row[0]).join(", ")}: ${isOpen ? "close" : "open"}`);
    element.addEventListener("click", () => toggle(key));
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle(key, true);
    });
  };
  const drawLine = (line) => {
    const [edge, head] = look(line.arrow);
    const group = make("g", { class: "wire" });
    group.wire = line;
    const told = line.arrow.values.slice(0, 4).map((v) => G.texts[v]).join(", ");
    const more = line.arrow.values.length > 4 ? ` and ${line.arrow.values.length - 4} more` : "";
    const why = line.arrow.cut ? `: ${line.arrow.cut}` : "";
    group.append(make("title", {}, told + more + why));
    const d = line.steps.map(([name, numbers]) =>
      name + numbers.map((n) => Math.round(n * 10) / 10).join(",")).join(" ");
    group.append(make("path", { class: edge, d }));
    const flat = line.steps.flatMap((step) => step[1]);
    const [fx, fy, x, y] = flat.slice(-4);
    const length = Math.hypot(x - fx, y - fy) || 1, dx = (x - fx) / length, dy = (y - fy) / length;
    if (line.head) {
      const [bx, by, sx, sy] = [x - 7 * dx, y - 7 * dy, -dy * 3.36, dx * 3.36];
      group.append(make("path", {
        class: head, d: `M${x},${y} L${bx + sx},${by + sy} L${bx - sx},${by - sy} Z`,
      }));
    }
    if (line.arrow.cut) {
      const back = Math.min(14, length / 2), cx = x - back * dx, cy = y - back * dy, a = 4.2;
      group.append(make("path", {
        class: "edge cut",
        d: `M${cx - a},${cy - a} L${cx + a},${cy + a} M${cx - a},${cy + a} L${cx + a},${cy - a}`,
      }));
    }
    return group;
  };

  // --- the page ---------------------------------------------------------------------------

  const stage = document.getElementById("stage"), status = document.getElementById("status");
  const search = document.getElementById("search");
  const canvas = make("svg", { class: "gt", role: "application", tabindex: "0",
    "aria-label": "The graph. Arrow keys move, plus and minus zoom, 0 fits all." });
  const world = make("g");
  canvas.append(world);
  stage.replaceChildren(canvas);
  let picture = null, view = { x: 0, y: 0, scale: 1 }, found = new Set();

  const show = () => {
    const { x, y, scale } = view;
    world.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
  };
  const draw = () => {
    picture = draft();
    const parts = [];
    for (const { x, y, key } of picture.headings) {
      parts.push(make("text", { class: `heading h${item(key).phase % 3}`, x, y }, item(key).name));
    }
    parts.push(...picture.frames.sort((a, b) => a.depth - b.depth).map(drawFrame));
    const cutLast = (line) => line.arrow.cut ? 1 : 0;
    parts.push(...picture.lines.sort((a, b) => cutLast(a) - cutLast(b)).map(drawLine));
    parts.push(...picture.boxes.map(drawBox));
    for (const label of picture.labels) {
      const width = textWidth(label.text, LINE) + 6;
      parts.push(rect(label.x - 3, label.y - 7, width, 14, 4, "halo"));
      parts.push(make("text", { class: label.cut ? "alert" : "label", x: label.x,
        y: label.y + 3.8 }, label.text));
    }
    world.replaceChildren(...parts);
    world.setAttribute("data-width", picture.width);
    show();
  };
  const fit = (least = 0) => {
    const room = canvas.getBoundingClientRect();
    const whole = Math.min(room.width / picture.width, room.height / picture.height, 1.25);
    const scale = Math.max(whole, least);
    const spare = Math.max(0, room.width - picture.width * scale);
    view = { scale, x: spare / 2, y: -picture.top * scale };
    show();
  };
  const toggle = (key, keepFocus = false) => {
    const before = picture.spots.get(key);
    if (opened.has(key)) opened.delete(key); else opened.add(key);
    const at = before ? [before.x * view.scale + view.x, before.y * view.scale + view.y] : null;
    draw();
    const after = picture.spots.get(key);
    if (at && after) {
      view.x = at[0] - after.x * view.scale;
      view.y = at[1] - after.y * view.scale;
      show();
    }
    tell(key);
    if (keepFocus) {
      const again = world.querySelector(`[data-key="${key}"]`);
      const target = again && (again.matches("[tabindex]") ? again : again.querySelector(".tab"));
      if (target) target.focus();
    }
  };
  const tell = (key) => {
    const it = item(key);
    const reads = G.arrows.filter((a) => a.target === key).length;
    const words = [it.name, ...it.rows.slice(1).map((row) => row[0])];
    if (it.hint) words.push(...it.hint.split("\n"));
    if (!isBlock(key) && reads) words.push(`reads ${reads}`);
    status.textContent = words.filter(Boolean).join("  ·  ");
  };
  const zoom = (factor, x, y) => {
    const room = canvas.getBoundingClientRect();
    x = x ?? room.width / 2; y = y ?? room.height / 2;
    const scale = Math.max(0.02, Math.min(6, view.scale * factor)), real = scale / view.scale;
    view = { scale, x: x - (x - view.x) * real, y: y - (y - view.y) * real };
    show();
  };
  const setAll = (open) => {
    opened.clear();
    if (open) for (const key of Object.keys(G.items)) if (isBlock(key)) opened.add(Number(key));
    draw();
    fit(open ? 0 : LEGIBLE);
  };

  // search
  let hits = [], current = -1;
  const seek = () => {
    const words = search.value.trim().toLowerCase();
    hits = words ? Object.keys(G.items).map(Number).filter((key) =>
      !G.columns.includes(key) && item(key).search.includes(words)) : [];
    current = -1;
    found = new Set(hits);
    draw();
    status.textContent = words ? `${hits.length} found: Enter goes to the next` : "";
  };
  const next = (step) => {
    if (!hits.length) return;
    current = (current + step + hits.length) % hits.length;
    const key = hits[current];
    for (const block of around(key)) if (!G.columns.includes(block)) opened.add(block);
    draw();
    const spot = picture.spots.get(key), room = canvas.getBoundingClientRect();
    view.scale = Math.max(view.scale, 0.9);
    view.x = room.width / 2 - (spot.x + spot.width / 2) * view.scale;
    view.y = room.height / 2 - (spot.y + spot.height / 2) * view.scale;
    show();
    tell(key);
    status.textContent = `${current + 1} of ${hits.length}  ·  ${status.textContent}`;
  };
  search.addEventListener("input", seek);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") { search.value = ""; seek(); canvas.focus(); }
  });

  // moving
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const room = canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey || !event.shiftKey) {
      const factor = Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0016));
      zoom(factor, event.clientX - room.left, event.clientY - room.top);
    } else {
      view.x -= event.deltaX || event.deltaY;
      show();
    }
  }, { passive: false });
  const fingers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, [event.clientX, event.clientY]);
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) return;
    const now = [event.clientX, event.clientY];
    if (fingers.size === 1) {
      view.x += now[0] - before[0];
      view.y += now[1] - before[1];
      show();
    } else {
      const other = [...fingers].find(([id]) => id !== event.pointerId)[1];
      const span = (p) => Math.hypot(p[0] - other[0], p[1] - other[1]) || 1;
      const room = canvas.getBoundingClientRect();
      zoom(span(now) / span(before), (now[0] + other[0]) / 2 - room.left,
        (now[1] + other[1]) / 2 - room.top);
    }
    fingers.set(event.pointerId, now);
  });
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
    canvas.addEventListener(name, (event) => fingers.delete(event.pointerId));
  }
  world.addEventListener("pointerover", (event) => {
    const group = event.target.closest("[data-key]");
    const key = group && group.classList.contains("box") ? Number(group.dataset.key) : null;
    for (const wire of world.querySelectorAll(".wire")) {
      const { source, target } = wire.wire.arrow;
      const near = key !== null && (standing(source) === key || standing(target) === key);
      wire.classList.toggle("near", near);
    }
    world.classList.toggle("looking", key !== null);
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select")) return;
    const step = 60;
    const keys = {
      ArrowLeft: () => { view.x += step; show(); }, ArrowRight: () => { view.x -= step; show(); },
      ArrowUp: () => { view.y += step; show(); }, ArrowDown: () => { view.y -= step; show(); },
      "+": () => zoom(1.2), "=": () => zoom(1.2), "-": () => zoom(1 / 1.2), "0": () => fit(),
      "/": () => search.focus(),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  const buttons = {
    fit: () => fit(), open: () => setAll(true), close: () => setAll(false),
    larger: () => zoom(1.25), smaller: () => zoom(0.8),
    theme: () => {
      const dark = matchMedia("(prefers-color-scheme: dark)").matches;
      const shown = document.documentElement.dataset.theme || (dark ? "dark" : "light");
      document.documentElement.dataset.theme = shown === "dark" ? "light" : "dark";
    },
  };
  for (const [name, act] of Object.entries(buttons)) {
    document.getElementById(name).addEventListener("click", act);
  }
  addEventListener("resize", () => fit(LEGIBLE));

  draw();
  fit(LEGIBLE);
  window.gradtools = { graph: G, opened, toggle, setAll, draft, draw, next };
})();
