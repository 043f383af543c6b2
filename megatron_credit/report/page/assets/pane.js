// One rollout: verdict, tokens, evidence.

function makePane(viewer, row) {
  const decoded = viewer.decoded;
  const { place } = row;
  const places = decoded.responses[place];
  const pane = {
    row,
    places,
    pieces: spellTokens(viewer.speller, places),
    mask: decoded.masks[place],
    details: decoded.details[place],
    series: Object.fromEntries(
      Object.entries(decoded.series).map(([name, values]) => [name, values[place]]),
    ),
  };
  pane.strip = makeStrip(pane);
  pane.tokens = makeTokens(pane);
  pane.node = make(
    "article",
    { class: "pane", "aria-label": `Sample ${row.sample}` },
    paneHead(row),
    verdictLine(row),
    pane.strip,
    pane.tokens,
    ...paneNotes(pane),
    ...evidence(pane),
  );
  listenToTokens(viewer, pane);
  return pane;
}

function paneHead(row) {
  return make(
    "header",
    { class: "pane-head" },
    make("h3", null, `sample ${row.sample}`),
    outcomeBadge(row.outcome),
    make("span", { class: "number" }, `reward ${brief(row.reward)}`),
    make("span", { class: "muted" }, `${counted(row.tokens, "token")}, ended by ${row.finish}`),
  );
}

function verdictLine(row) {
  const named = (name, value) =>
    make(
      "span",
      null,
      make("span", { class: "muted" }, `${name} `),
      value === null ? NOTHING : make("code", null, value),
    );
  return make(
    "p",
    { class: "verdict" },
    named("answer found", row.parsed),
    named("reference", row.answer),
  );
}

function paneNotes(pane) {
  const versions = [...new Set(pane.details.versions.map(([version]) => version))];
  const masked = pane.mask.length - sum(Array.from(pane.mask));
  const notes = [
    `weights ${versions.length === 1 ? "version" : "versions"} ${versions.join(", ") || "unknown"}`,
  ];
  if (masked) notes.push(`${counted(masked, "token")} not sampled (hatched)`);
  return [make("p", { class: "muted small" }, notes.join(" \u00b7 "))];
}

function evidence(pane) {
  const texts = { ...pane.details.evidence };
  if (pane.details.text !== null) texts["text as recorded"] = pane.details.text;
  return Object.entries(texts).map(([name, text]) =>
    make(
      "details",
      { class: "evidence" },
      make("summary", null, name in pane.details.evidence ? `evidence: ${name}` : name),
      make("pre", null, text),
    ),
  );
}

function listenToTokens(viewer, pane) {
  const placeOf = (event) => {
    const node = event.target.closest(".token");
    return node ? Number(node.dataset.at) : null;
  };
  const show = (event) => {
    const at = placeOf(event);
    if (at !== null) showCard(viewer.run, viewer.speller, pane, at);
  };
  pane.tokens.addEventListener("pointerover", show);
  pane.tokens.addEventListener("focusin", show);
  pane.tokens.addEventListener("pointerleave", hideCard);
  pane.tokens.addEventListener("focusout", hideCard);
  pane.tokens.addEventListener("click", (event) => pane.tokenNodes[placeOf(event)]?.focus());
  pane.tokens.addEventListener("keydown", (event) => tokenKey(pane, placeOf(event), event));
}

// Left and right by tokens; up and down by lines, to the token nearest above or below.
function tokenKey(pane, at, event) {
  const last = pane.tokenNodes.length - 1;
  const targets = {
    ArrowLeft: () => at - 1,
    ArrowRight: () => at + 1,
    ArrowUp: () => onOtherLine(pane, at, -1),
    ArrowDown: () => onOtherLine(pane, at, 1),
    Home: () => 0,
    End: () => last,
  };
  if (at === null || !(event.key in targets)) return;
  event.preventDefault();
  const next = targets[event.key]();
  if (next < 0 || next > last) return;
  pane.tokenNodes[at].tabIndex = -1;
  pane.tokenNodes[next].tabIndex = 0;
  pane.tokenNodes[next].focus();
}

function onOtherLine(pane, at, direction) {
  const start = pane.tokenNodes[at].getBoundingClientRect();
  let best = at;
  let line = null;
  for (let next = at + direction; pane.tokenNodes[next]; next += direction) {
    const box = pane.tokenNodes[next].getBoundingClientRect();
    if (Math.abs(box.top - start.top) < 4) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) >= 4) break;
    if (
      best === at ||
      Math.abs(box.left - start.left) <
        Math.abs(pane.tokenNodes[best].getBoundingClientRect().left - start.left)
    )
      best = next;
  }
  return best;
}
