// The keyboard.

const KEYS = [
  ["j  k", "next, previous rollout of the table"],
  ["J  K", "next, previous group"],
  ["\u2190 \u2192 \u2191 \u2193", "between tokens, once a token has the focus"],
  ["t", "to the first token"],
  ["c  C", "next, previous colouring"],
  ["s", "side by side"],
  ["/", "search"],
  ["d", "dark or light"],
  ["?", "this list"],
  ["Esc", "close, leave a field"],
];

function listenToKeys({ table, viewer, filters, toggleTheme }) {
  const actions = {
    j: () => stepRow(table, 1),
    k: () => stepRow(table, -1),
    J: () => stepGroup(table, 1),
    K: () => stepGroup(table, -1),
    c: () => cycleColour(viewer, 1),
    C: () => cycleColour(viewer, -1),
    s: () => viewer.other && toggleBeside(viewer),
    t: () => viewer.panes[0]?.tokenNodes[0]?.focus(),
    "/": () => filters.parts.text.focus(),
    d: toggleTheme,
    "?": showHelp,
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const typing = event.target.matches("input:not([type=checkbox]), select, textarea");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  });
}

function cycleColour(viewer, move) {
  if (!viewer.row) return;
  const names = coloursOf(viewer);
  setColour(viewer, names.at((names.indexOf(colourShown(viewer)) + move) % names.length));
}

function leave() {
  document.getElementById("help").close();
  document.activeElement?.blur();
  hideCard();
}

function showHelp() {
  const help = document.getElementById("help");
  if (help.open) return help.close();
  const list = make(
    "dl",
    null,
    ...KEYS.flatMap(([keys, meaning]) => [
      make("dt", null, make("kbd", null, keys)),
      make("dd", null, meaning),
    ]),
  );
  help.replaceChildren(
    make("h2", null, "Keys"),
    list,
    make("button", { click: () => help.close() }, "close"),
  );
  help.showModal();
}
