// Puts the page together.

function drawHead(run, toggleTheme) {
  const results = run.results.map(([name, step, value]) =>
    fact(`${name}, step ${step}`, exact(value)),
  );
  const facts = run.facts.map(([name, value]) =>
    fact(name, typeof value === "object" ? JSON.stringify(value) : String(value)),
  );
  const buttons = make(
    "div",
    { class: "buttons" },
    make("button", { class: "quiet", click: showHelp }, "keys ", make("kbd", null, "?")),
    make("button", { class: "quiet", id: "theme", click: toggleTheme }, "dark / light"),
  );
  const config = make(
    "details",
    { class: "config" },
    make("summary", null, "config.json"),
    make("pre", null, JSON.stringify(run.config, null, 2)),
  );
  document
    .getElementById("head")
    .append(
      make(
        "div",
        { class: "title" },
        make("h1", null, run.run),
        make("span", { class: "muted wide-only" }, "megatron-credit"),
        buttons,
      ),
      results.length ? make("dl", { class: "results" }, ...results) : "",
      make("dl", { class: "facts" }, ...facts),
      Object.keys(run.config).length ? config : "",
    );
}

function fact(name, value) {
  return make("div", null, make("dt", null, name), make("dd", null, value));
}

function drawNotices(run) {
  document
    .getElementById("notices")
    .append(...run.notices.map((text) => make("p", { class: "notice" }, text)));
}

// The newest group in which there is something to compare, at its best rollout.
function firstRollout(run) {
  const group = run.groups.findLast((each) => each.mixed) ?? run.groups.at(-1);
  if (!group) return null;
  return rolloutsOf(run, group).reduce((best, row) =>
    (row.reward ?? -Infinity) > (best.reward ?? -Infinity) ? row : best,
  );
}

async function start() {
  const run = await loadRun();
  run.hasTexts = run.groups.some((group) => !group.spelled);
  const speller = makeSpeller(run.vocabulary);
  const parts = {};
  parts.toggleTheme = () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    recolour(parts.viewer);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    recolour(parts.viewer),
  );
  parts.viewer = makeViewer(run, speller, (row) =>
    row ? open(parts, row, {}) : history.replaceState(null, "", linkTo(parts.viewer)),
  );
  parts.filters = makeFilters(run, speller, (test) => {
    filterTable(parts.table, test);
    if (parts.table.open) markOpen(parts.table, parts.table.open);
  });
  parts.table = makeTable(run, (row, options) => open(parts, row, options));
  const curves = makeCurves(run, (step) => parts.filters.setSteps(step, step));
  parts.filters.charts = curves.charts;
  drawHead(run, parts.toggleTheme);
  drawNotices(run);
  document.getElementById("curves").append(curves.node);
  document
    .getElementById("rollouts")
    .append(
      make("div", { class: "section-head" }, make("h2", null, "Rollouts"), parts.table.count),
      parts.filters.node,
      parts.table.node,
    );
  document.getElementById("viewer").append(parts.viewer.node);
  listenToKeys(parts);
  addEventListener("scroll", hideCard, { passive: true });
  addEventListener("hashchange", () => openLink(parts, run));
  await openLink(parts, run);
  document.documentElement.dataset.ready = "yes";
}

// reveal: scroll to the viewer; fresh: compare with the counterpart, not with the one shown before.
async function open(parts, row, { reveal = false, fresh = false, other = undefined }) {
  const opened = await openRollout(
    parts.viewer,
    row,
    fresh ? counterpart(parts.viewer.run, row) : other,
  );
  if (!opened) return;
  markOpen(parts.table, row);
  history.replaceState(null, "", linkTo(parts.viewer));
  if (reveal) document.getElementById("viewer").scrollIntoView({ block: "start" });
}

async function openLink(parts, run) {
  const linked = followLink(run, location.hash);
  const row = linked?.row ?? firstRollout(run);
  if (!row) return;
  if (linked)
    Object.assign(parts.viewer, {
      beside: linked.beside,
      colour: linked.colour ?? parts.viewer.colour,
    });
  await open(parts, row, { other: linked?.other, reveal: linked !== null });
}

start();
