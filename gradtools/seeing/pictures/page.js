// Handles interaction: opens and closes blocks, and moves, zooms and searches the graph.
//
// layout.js computes the positions, and markup.js draws the picture.
"use strict";
(() => {
  const G = JSON.parse(document.getElementById("graph").textContent);
  const LEGIBLE = 0.62, FAR = 0.25; // scales at which text is easy to read, and illegible
  const MANY = 400; // a picture with more boxes is drawn only near the visible window
  const opened = layout.fitted(G).opened;
  const item = (key) => G.items[key];
  const isBlock = (key) => item(key).children !== undefined;
  const standing = (key) => layout.seenAs(G, opened, key);

  // --- the page ---------------------------------------------------------------------------

  const stage = document.getElementById("stage"), status = document.getElementById("status");
  const search = document.getElementById("search");
  stage.innerHTML = '<svg class="gt" role="application" tabindex="0" aria-label="The graph. ' +
    'Arrow keys move, plus and minus zoom, 0 fits all."><g></g></svg>';
  const canvas = stage.firstElementChild, world = canvas.firstElementChild;
  let picture = null, view = { x: 0, y: 0, scale: 1 }, found = new Set();
  let painted = null; // the drawn window, and whether text is omitted

  // Returns the visible window, enlarged by `around` screens on each side.
  const seen = (around) => {
    const { x, y, scale } = view, room = canvas.getBoundingClientRect();
    const [width, height] = [room.width / scale, room.height / scale];
    return [-x / scale - around * width, -y / scale - around * height,
      -x / scale + (1 + around) * width, -y / scale + (1 + around) * height];
  };
  const paint = () => {
    const large = picture.boxes.length > MANY, far = large && view.scale < FAR;
    painted = { window: large ? seen(1) : null, far };
    world.innerHTML = markup.body(G, picture, { hands: true, found, ...painted });
  };
  const isPainted = () => {
    if (!painted.window) return true;
    const [left, upper, right, lower] = seen(0), [l, u, r, d] = painted.window;
    return painted.far === view.scale < FAR && left >= l && upper >= u && right <= r && lower <= d;
  };
  const show = () => {
    const { x, y, scale } = view;
    world.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
    if (!isPainted()) paint();
  };
  const draft = () => layout.layout(G, opened);
  const draw = () => {
    picture = draft();
    document.getElementById("key").innerHTML = markup.key(G, picture);
    paint();
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

  // the item that is clicked, or selected with the keyboard
  const keyAt = (target, selector) => {
    const near = target.closest(selector);
    return near ? Number(near.closest("[data-key]").dataset.key) : null;
  };
  world.addEventListener("click", (event) => {
    const key = keyAt(event.target, "[role=button]");
    if (key !== null) toggle(key);
    else if (keyAt(event.target, ".box") !== null) tell(keyAt(event.target, ".box"));
  });
  world.addEventListener("keydown", (event) => {
    const key = keyAt(event.target, "[role=button]");
    if (key === null || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    toggle(key, true);
  });

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
    for (const block of layout.blocksAround(G, key)) opened.add(block);
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
    const key = keyAt(event.target, ".box");
    for (const wire of world.querySelectorAll(".wire")) {
      const ends = [wire.dataset.from, wire.dataset.to].map(Number).map(standing);
      wire.classList.toggle("near", key !== null && ends.includes(key));
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
  window.gradtools = { graph: G, opened, toggle, setAll, draft, draw, next, view: () => view };
})();
