// Converts a picture to SVG: one element for each box, frame, line and label, and the legend. The
// result is text, so a page shows the same picture that drawing.py writes to a file; `hands` adds
// the attributes for interaction. Arrowheads are shapes without ids, which could clash on a page.
"use strict";
const markup = (() => {
  const ARROWHEAD = 7, MARGIN = 24, KEY_ROW = 20, LEAST_WIDTH = 300;

  const n = (number) => number.toFixed(1).replace(/\.0$/, "");
  const content = (text) =>
    text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const attribute = (text) => content(text).replace(/"/g, "&quot;");
  const rect = (x, y, width, height, radius, name) =>
    `<rect class="${name}" x="${n(x)}" y="${n(y)}" width="${n(width)}" height="${n(height)}" ` +
    `rx="${n(radius)}"/>`;
  const text = (x, y, words, name, more = "") =>
    `<text class="${name}" x="${n(x)}" y="${n(y)}"${more}>${content(words)}</text>`;
  const titled = (words) => words ? `<title>${content(words)}</title>` : "";

  const isBlock = (item) => item.children !== undefined;
  // Returns the attributes with which keyboards and screen readers open and close a block.
  const handle = (item, isOpen) => {
    const about = item.rows.slice(1).map((row) => row[0]).join(", ");
    const label = `${item.name}, ${about}: ${isOpen ? "close" : "open"}`;
    return ` tabindex="0" role="button" aria-expanded="${isOpen}" aria-label="${attribute(label)}"`;
  };

  const box = (G, { key, x, y }, { hands = false, found = new Set(), far = false }) => {
    const item = G.items[key], closed = isBlock(item), phase = item.phase % 3;
    const names = ["box", `p${phase}`, closed ? "block" : "",
      closed || item.kind === "operation" ? "" : `leaf ${item.kind}`,
      item.mark ? "marked" : "", found.has(key) ? "found" : ""];
    const leaf = item.kind === "input" || item.kind === "output";
    const radius = leaf ? Math.min(16, item.height / 2) : 5;
    const { width, height } = item;
    const middle = x + width / 2, parts = far ? [] : [titled(item.hint)];
    parts.push(rect(x, y, width, height, radius, "card"));
    for (const [words, style, below, pill] of far ? [] : item.rows) {
      if (pill) parts.push(rect(middle - pill / 2, y + below - 10.5, pill, 14, 7, "pill"));
      parts.push(text(middle, y + below, words, style, ' text-anchor="middle"'));
    }
    const more = hands && closed ? handle(item, false) : "";
    return `<g class="${names.filter(Boolean).join(" ")}" data-key="${key}"${more}>` +
      `${parts.join("")}</g>`;
  };
  const frame = (G, { key, x, y, width, height, nameX }, hands) => {
    const item = G.items[key], phase = item.phase % 3;
    const name = text(nameX, y + 17, `▾ ${item.short}`, `h${phase}`);
    const hot = rect(nameX - 5, y + 5, item.nameWidth + 10, 17, 4, "hot");
    const tab = hands ? `<g class="tab"${handle(item, true)}>${hot}${name}</g>` : name;
    return `<g class="frame p${phase}" data-key="${key}">${titled(item.hint)}` +
      `${rect(x, y, width, height, 8, "around")}${tab}</g>`;
  };
  // Returns the classes of a line and of its arrowhead.
  const look = (G, arrow) => {
    if (arrow.cut) return ["edge cut", "acut"];
    const saved = arrow.saved ? " saved" : "", phase = G.items[arrow.source].phase % 3;
    if (arrow.strength === 2) return ["edge zero", "azero"];
    if (arrow.strength < 2) return [`edge data${saved}`, "adata"];
    return [`edge e${phase}${saved}`, `a${phase}`];
  };
  const about = (G, arrow) => {
    const listed = arrow.values.slice(0, 4).map((v) => G.texts[v]).join(", ");
    const more = arrow.values.length > 4 ? ` and ${arrow.values.length - 4} more` : "";
    return listed + more + (arrow.cut ? `: ${arrow.cut}` : "");
  };
  const line = (G, { steps, arrow, head }) => {
    const [edge, tip] = look(G, arrow);
    const path = steps.map(([name, numbers]) => name + numbers.map(n).join(",")).join(" ");
    const parts = [titled(about(G, arrow)), `<path class="${edge}" d="${path}"/>`];
    if (head) parts.push(`<path class="${tip}" d="${arrowhead(steps)}"/>`);
    if (arrow.cut) parts.push(`<path class="edge cut" d="${cross(steps)}"/>`);
    return `<g class="wire" data-from="${arrow.source}" data-to="${arrow.target}">` +
      `${parts.join("")}</g>`;
  };
  // Returns a line's last point, and the direction and length of its last segment.
  const ending = (steps) => {
    const [fromX, fromY, x, y] = steps.flatMap((step) => step[1]).slice(-4);
    const length = Math.hypot(x - fromX, y - fromY) || 1;
    return { x, y, dx: (x - fromX) / length, dy: (y - fromY) / length, length };
  };
  const arrowhead = (steps) => {
    const { x, y, dx, dy } = ending(steps);
    const bx = x - ARROWHEAD * dx, by = y - ARROWHEAD * dy;
    const sx = -dy * ARROWHEAD * 0.48, sy = dx * ARROWHEAD * 0.48;
    const corners = [[x, y], [bx + sx, by + sy], [bx - sx, by - sy]];
    return `M${corners.map(([cx, cy]) => `${n(cx)},${n(cy)}`).join(" L")} Z`;
  };
  // Returns the cross on a cut line, just before the line's end.
  const cross = (steps) => {
    const { x, y, dx, dy, length } = ending(steps), back = Math.min(14, length / 2);
    const cx = x - back * dx, cy = y - back * dy;
    const [left, right, upper, lower] = [cx - 4.2, cx + 4.2, cy - 4.2, cy + 4.2].map(n);
    return `M${left},${upper} L${right},${lower} M${left},${lower} L${right},${upper}`;
  };
  const label = ({ x, y, width, text: words, arrow }) => [
    rect(x - 3, y - 7, width + 6, 14, 4, "halo"),
    text(x, y + 3.8, words, arrow.cut ? "alert" : "label"),
  ];

  // Returns the part of a picture that intersects a window (left, upper, right, lower).
  const within = (G, picture, [left, upper, right, lower]) => {
    const meets = (x, y, width, height) =>
      x <= right && x + width >= left && y <= lower && y + height >= upper;
    const spans = (from, to, [low, high]) => from <= high && to >= low;
    const lineMeets = ({ steps }) => {
      let [x, y, endX, endY] = [Infinity, Infinity, -Infinity, -Infinity];
      for (const [, numbers] of steps) {
        for (let i = 0; i < numbers.length; i += 2) {
          x = Math.min(x, numbers[i]); endX = Math.max(endX, numbers[i]);
          y = Math.min(y, numbers[i + 1]); endY = Math.max(endY, numbers[i + 1]);
        }
      }
      return spans(x, endX, [left, right]) && spans(y, endY, [upper, lower]);
    };
    return {
      ...picture,
      frames: picture.frames.filter((it) => meets(it.x, it.y, it.width, it.height)),
      lines: picture.lines.filter(lineMeets),
      boxes: picture.boxes.filter(({ key, x, y }) =>
        meets(x, y, G.items[key].width, G.items[key].height)),
      labels: picture.labels.filter((it) => meets(it.x, it.y - 7, it.width, 14)),
    };
  };
  // Draws a picture at a scale without legible text: lines with equal classes form one path.
  const farBody = (G, picture, options) => {
    const paths = new Map();
    for (const { steps, arrow } of picture.lines) {
      const [edge] = look(G, arrow);
      if (!paths.has(edge)) paths.set(edge, []);
      paths.get(edge).push(...steps.map(([name, numbers]) => name + numbers.map(n).join(",")));
    }
    return [
      ...picture.frames.map((it) =>
        `<g class="frame p${G.items[it.key].phase % 3}" data-key="${it.key}">` +
        `${rect(it.x, it.y, it.width, it.height, 8, "around")}</g>`),
      ...[...paths].map(([edge, steps]) => `<path class="${edge}" d="${steps.join(" ")}"/>`),
      ...picture.boxes.map((it) => box(G, it, options)),
    ].join("\n");
  };

  // Draws frames, lines, boxes and labels, from back to front.
  const body = (G, picture, options = {}) => {
    if (options.window) picture = within(G, picture, options.window);
    if (options.far) return farBody(G, picture, options);
    const { hands = false } = options;
    const frames = [...picture.frames].sort((a, b) => a.depth - b.depth);
    const isCut = (drawn) => drawn.arrow.cut ? 1 : 0;
    const lines = [...picture.lines].sort((a, b) => isCut(a) - isCut(b));
    return [
      ...picture.headings.map(({ key, x, y }) =>
        text(x, y, G.items[key].name, `heading h${G.items[key].phase % 3}`)),
      ...frames.map((it) => frame(G, it, hands)),
      ...lines.map((it) => line(G, it)),
      ...picture.boxes.map((it) => box(G, it, options)),
      ...picture.labels.flatMap(label),
    ].join("\n");
  };

  // --- the legend -----------------------------------------------------------------------------

  // Returns the entries of the picture's legend: kind, classes, label and the label's width.
  const legend = (G, picture) => {
    const items = picture.boxes.map((it) => G.items[it.key]);
    const looks = [...new Set(picture.lines.map((it) => look(G, it.arrow)[0]))].sort();
    const phases = [...new Set(items.map((item) => item.phase))].sort();
    const entry = (kind, classes, name) => [kind, classes, ...G.words[name]];
    const found = phases.length > 1 ? phases.map((p) => entry("box", `box p${p % 3}`, p)) : [];
    for (const kind of ["input", "captured"]) {
      if (items.some((item) => item.kind === kind)) {
        found.push(entry("box", `box leaf ${kind} p0`, kind));
      }
    }
    const saved = looks.filter((classes) => classes.includes("saved"));
    if (saved.length) found.push(entry("line", saved[saved.length - 1], "saved"));
    for (const name of ["data", "zero", "cut"]) {
      if (looks.some((classes) => classes.split(" ").includes(name))) {
        found.push(entry("line", `edge ${name}`, name));
      }
    }
    return found;
  };
  const keyWidth = ([kind, , , width]) => width + 54;
  const keyEntry = ([kind, classes, word], x, y) => {
    const radius = classes.includes("leaf") ? 6 : 3, parts = [];
    if (kind === "box") {
      parts.push(`<g class="${classes}">${rect(x, y - 6, 26, 12, radius, "card")}</g>`);
    } else {
      parts.push(`<path class="${classes}" d="M${n(x)},${n(y)} L${n(x + 26)},${n(y)}"/>`);
    }
    parts.push(text(x + 33, y + 3.8, word, "label"));
    return parts;
  };
  // Returns one SVG for each entry of the legend; a page wraps the entries and defines the styles.
  const key = (G, picture) => legend(G, picture).map((entry) =>
    `<svg class="gt" width="${n(keyWidth(entry))}" height="${n(KEY_ROW)}">` +
    `${keyEntry(entry, 2, 10).join("")}</svg>`).join("");
  // Wraps the entries into rows of at most this width, each entry with its x.
  const keyRows = (entries, width) => {
    const rows = [];
    let x = width;
    for (const entry of entries) {
      if (x + keyWidth(entry) > width || !rows.length) { rows.push([]); x = 0; }
      rows[rows.length - 1].push([x, entry]);
      x += keyWidth(entry);
    }
    return rows;
  };

  // Returns a picture as an SVG document with a title and the legend.
  const file = (G, picture, style) => {
    const width = Math.max(picture.width, LEAST_WIDTH, G.title.width + 2 * MARGIN);
    const rows = keyRows(legend(G, picture), width - 2 * MARGIN);
    const above = G.title.text ? 30 : 0, below = rows.length ? rows.length * KEY_ROW + 12 : 0;
    const top = picture.top - above, height = picture.height + above + below;
    const under = picture.top + picture.height + 8;
    const drawn = body(G, picture);
    return [
      '<svg xmlns="http://www.w3.org/2000/svg" class="gt" ' +
      `viewBox="0 ${n(top)} ${n(width)} ${n(height)}" width="${n(width)}" height="${n(height)}" ` +
      `role="img" aria-label="${attribute(G.summary)}">`,
      `<style>\n${style}</style>`,
      `<rect class="paper" x="0" y="${n(top)}" width="${n(width)}" height="${n(height)}"/>`,
      ...(G.title.text
        ? [text(MARGIN, top + MARGIN + 6, G.title.text, "heading", ' style="font-size:15px"')] : []),
      ...(drawn ? [drawn] : []),
      ...rows.flatMap((row, i) =>
        row.flatMap(([x, entry]) => keyEntry(entry, MARGIN + x, under + i * KEY_ROW))),
      "</svg>",
    ].join("\n") + "\n";
  };
  return { body, key, file };
})();
