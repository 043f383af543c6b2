// The card with everything that is known of the token under the pointer or with the focus.

const CARD_GAP = 8;

function showCard(run, speller, pane, at) {
  const card = document.getElementById("card");
  const place = pane.places[at];
  const rows = [
    ["token", `${at + 1} of ${pane.pieces.length}`],
    ["id", String(run.vocabulary.ids[place])],
    ...numberRows(pane, at),
    ...spanRows(pane.details, at),
    ["weights", versionOf(pane.details, at)],
  ];
  const list = make(
    "dl",
    null,
    ...rows.flatMap(([name, value]) => [
      make("dt", null, name),
      make("dd", { class: "number" }, value),
    ]),
  );
  const notes = [
    pane.mask[at] ? null : "not sampled by the policy: not trained",
    precisionNote(run.mantissa),
  ].filter(Boolean);
  card.replaceChildren(
    make("div", { class: "card-token" }, describePiece(speller, place)),
    list,
    ...notes.map((note) => make("p", { class: "muted" }, note)),
  );
  card.hidden = false;
  placeCard(card, pane.tokenNodes[at]);
}

function numberRows(pane, at) {
  return Object.entries(pane.series)
    .filter(([, values]) => !Number.isNaN(values[at]))
    .map(([name, values]) => [seriesLabel(name), precise(values[at])]);
}

function precise(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return minus(
    size >= 1e5 || size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(5))),
  );
}

// Large pages keep fewer bits of each number.
function precisionNote(mantissa) {
  return mantissa < 23
    ? `numbers of tokens are rounded to within ${brief(100 * 2 ** (-mantissa - 1))} %`
    : null;
}

function spanRows(details, at) {
  return SPAN_KINDS.filter((kind) => details.spans[kind]).flatMap((kind) => {
    const number = details.spans[kind].findIndex(([start, end]) => start <= at && at < end);
    if (number < 0) return [];
    const score = details.spans[kind][number][2];
    return [[kind, score === null ? String(number + 1) : `${number + 1}, score ${brief(score)}`]];
  });
}

function versionOf(details, at) {
  const found = details.versions.find(([, start, end]) => start <= at && at < end);
  return found ? `version ${found[0]}` : "unknown";
}

function placeCard(card, node) {
  const token = node.getClientRects()[0] ?? node.getBoundingClientRect();
  const left = Math.min(
    token.left,
    document.documentElement.clientWidth - card.offsetWidth - CARD_GAP,
  );
  const below = token.bottom + CARD_GAP;
  const fits = below + card.offsetHeight < innerHeight;
  card.style.left = `${Math.max(CARD_GAP, left)}px`;
  card.style.top = `${Math.max(CARD_GAP, fits ? below : token.top - card.offsetHeight - CARD_GAP)}px`;
}

function hideCard() {
  document.getElementById("card").hidden = true;
}
