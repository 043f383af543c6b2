// The credit viewer: one rollout, or two of its group side by side on one colour scale.

const WIDE = 1000;

function makeViewer(run, speller, onChange) {
  const viewer = {
    run,
    speller,
    onChange,
    row: null,
    other: null,
    beside: innerWidth >= WIDE,
    colour: "advantage",
    panes: [],
    turn: 0,
  };
  viewer.node = make("div", { class: "viewer", tabindex: "-1" });
  return viewer;
}

// The rollout furthest from this one in reward: the worst beside the best, the best beside others.
function counterpart(run, row) {
  const ranked = rolloutsOf(run, row.group)
    .filter((other) => other !== row && other.reward !== null)
    .sort((a, b) => b.reward - a.reward);
  const [best, worst] = [ranked[0], ranked.at(-1)];
  if (!best) return rolloutsOf(run, row.group).find((other) => other !== row) ?? null;
  return row.reward > worst.reward ? worst : best;
}

async function openRollout(viewer, row, other = undefined) {
  const group = row.group;
  const turn = ++viewer.turn;
  const decoded = await decodeGroup(viewer.run, group);
  if (turn !== viewer.turn) return false;
  const keep =
    viewer.other && viewer.other !== row && viewer.other.group === group
      ? viewer.other
      : counterpart(viewer.run, row);
  Object.assign(viewer, { row, decoded, other: other === undefined ? keep : other });
  drawViewer(viewer);
  return true;
}

function drawViewer(viewer) {
  const { row, other } = viewer;
  hideCard();
  const shown = viewer.beside && other ? [row, other] : [row];
  viewer.panes = shown.map((each) => makePane(viewer, each));
  viewer.legend = make("div", { class: "legend-place" });
  const panes = make(
    "div",
    { class: shown.length > 1 ? "panes two" : "panes" },
    ...viewer.panes.map((pane) => pane.node),
  );
  viewer.node.replaceChildren(titleLine(viewer), toolbar(viewer), promptBox(viewer), panes);
  recolour(viewer);
}

function titleLine(viewer) {
  const { group } = viewer.row;
  const place = [
    `step ${group.step}`,
    group.source,
    group.noGradient ? "no gradient from this group" : "",
  ]
    .filter(Boolean)
    .join(" \u00b7 ");
  return make(
    "div",
    { class: "section-head" },
    make("h2", null, "Credit"),
    make("code", { class: "prompt-id" }, group.prompt),
    make("span", { class: "muted" }, place),
  );
}

function toolbar(viewer) {
  return make(
    "div",
    { class: "toolbar" },
    groupStrip(viewer),
    make("div", { class: "tools" }, colourChoice(viewer), viewer.legend, besideChoice(viewer)),
  );
}

// A button for each rollout of the group; the second one has a dashed frame.
function groupStrip(viewer) {
  const buttons = rolloutsOf(viewer.run, viewer.row.group).map((row) => {
    const role =
      row === viewer.row ? "first" : row === viewer.other && viewer.beside ? "second" : "";
    const label = `sample ${row.sample}, ${row.outcome}, reward ${brief(row.reward)}`;
    const pick = (event) =>
      event.shiftKey && row !== viewer.row ? chooseOther(viewer, row) : viewer.onChange(row);
    return make(
      "button",
      {
        class: `chip ${row.outcome} ${role}`,
        "aria-label": label,
        "aria-pressed": String(role === "first"),
        title: `${label}; with Shift: beside the first`,
        click: pick,
      },
      outcomeSign(row),
      String(row.sample),
    );
  });
  return make(
    "div",
    { class: "strip-of-group", role: "group", "aria-label": "Rollouts of the group" },
    ...buttons,
  );
}

function outcomeSign(row) {
  return make(
    "span",
    { class: "sign", "aria-hidden": "true" },
    OUTCOME_SIGNS[row.outcome] ?? "\u2022",
  );
}

// The series that have a number somewhere in the group, advantage first.
function coloursOf(viewer) {
  const having = Object.entries(viewer.decoded.series).filter(([, parts]) =>
    parts.some((part) => part.some((value) => !Number.isNaN(value))),
  );
  const names = having.map(([name]) => name);
  return names.length ? names : ["advantage"];
}

// The chosen colouring, or the first where this group has no such numbers.
function colourShown(viewer) {
  const names = coloursOf(viewer);
  return names.includes(viewer.colour) ? viewer.colour : names[0];
}

function colourChoice(viewer) {
  const select = choice(
    "Colour tokens by",
    coloursOf(viewer).map((name) => [name, seriesLabel(name)]),
  );
  select.id = "colour";
  select.value = colourShown(viewer);
  select.addEventListener("input", () => setColour(viewer, select.value));
  return make("label", null, "colour by ", select);
}

function setColour(viewer, name) {
  viewer.colour = name;
  document.getElementById("colour").value = name;
  recolour(viewer);
  viewer.onChange(null);
}

function recolour(viewer) {
  if (!viewer.row) return;
  const name = colourShown(viewer);
  const scale = makeScale(name, viewer.panes.map((pane) => pane.series[name]).filter(Boolean));
  viewer.legend.replaceChildren(legend(scale));
  for (const pane of viewer.panes) paintTokens(pane, scale);
}

function besideChoice(viewer) {
  const others = rolloutsOf(viewer.run, viewer.row.group).filter((row) => row !== viewer.row);
  if (!others.length) return make("span", { class: "muted" }, "a group of one");
  const box = make("input", { type: "checkbox", id: "beside", checked: viewer.beside });
  box.addEventListener("input", () => toggleBeside(viewer));
  const select = choice(
    "Second rollout",
    others.map((row) => [row.number, `sample ${row.sample} (${row.outcome})`]),
  );
  select.value = viewer.other?.number;
  select.addEventListener("input", () =>
    chooseOther(viewer, viewer.run.rollouts[Number(select.value)]),
  );
  return make("span", { class: "beside" }, make("label", null, box, "beside "), select);
}

function chooseOther(viewer, row) {
  Object.assign(viewer, { other: row, beside: true });
  drawViewer(viewer);
  viewer.onChange(null);
}

function toggleBeside(viewer) {
  viewer.beside = !viewer.beside;
  drawViewer(viewer);
  viewer.onChange(null);
}

function promptBox(viewer) {
  const text = spell(viewer.speller, viewer.decoded.prompt);
  return make(
    "details",
    { class: "prompt", open: text.length < 1500 },
    make("summary", null, `prompt, ${counted(viewer.decoded.prompt.length, "token")}`),
    make("pre", null, text),
  );
}
