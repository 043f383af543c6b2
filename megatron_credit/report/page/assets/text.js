// Token pieces to text. A piece may be a part of a character: the character then shows at the token
// that completes it, and every token that has a part of it carries a mark.

const PART_MARK = "\u2b1a";

function makeSpeller(vocabulary) {
  const encoder = new TextEncoder();
  const fromHex = (hex) => Uint8Array.from(hex.match(/../g), (pair) => parseInt(pair, 16));
  const bytesOf = (place) =>
    place in vocabulary.parts
      ? fromHex(vocabulary.parts[place])
      : encoder.encode(vocabulary.texts[place] ?? `<${vocabulary.ids[place]}>`);
  return { vocabulary, bytesOf };
}

function isKnown(speller, place) {
  return speller.vocabulary.texts[place] !== null || place in speller.vocabulary.parts;
}

// One {text, part, known} for each token.
function spellTokens(speller, places) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  return Array.from(places, (place, at) => ({
    text: decoder.decode(speller.bytesOf(place), { stream: at < places.length - 1 }),
    part: place in speller.vocabulary.parts,
    known: isKnown(speller, place),
  }));
}

// The text of many tokens, at once where all of them are whole characters.
function spell(speller, places) {
  const { texts } = speller.vocabulary;
  let text = "";
  for (const place of places) {
    if (texts[place] === null)
      return spellTokens(speller, places)
        .map((each) => each.text)
        .join("");
    text += texts[place];
  }
  return text;
}

// What the card shows of a token by itself.
function describePiece(speller, place) {
  const { texts, parts } = speller.vocabulary;
  if (place in parts) return `bytes ${parts[place].match(/../g).join(" ")}, a part of a character`;
  return texts[place] === null ? "not in the vocabulary" : JSON.stringify(texts[place]);
}

// Prompt, response and parsed answer of every rollout in lower case, for the search.
async function searchTexts(run, speller) {
  const texts = new Array(run.rollouts.length);
  for (const group of run.groups) {
    const tokens = await groupTokens(run, group);
    const details = run.hasTexts ? await inflateJson(blob(run, group, 2)) : null;
    const head = `${group.prompt}\n${spell(speller, tokens.prompt)}\n`;
    for (const [place, response] of tokens.responses.entries()) {
      const text = details?.[place].text ?? spell(speller, response);
      texts[group.first + place] = `${head}${text}\n${group.parsed[place] ?? ""}`.toLowerCase();
    }
  }
  return texts;
}
