// The data of the page. Rollouts are known by their number, over all groups; the token ids and
// numbers of a group are decoded when somebody asks for them.

async function inflate(base64) {
  const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function inflateJson(base64) {
  return JSON.parse(new TextDecoder().decode(await inflate(base64)));
}

async function loadRun() {
  const run = await inflateJson(document.getElementById("index").textContent);
  run.blobText = document.getElementById("blobs").textContent;
  run.rollouts = [];
  let offset = 0;
  for (const [number, group] of run.groups.entries()) {
    group.number = number;
    group.first = run.rollouts.length;
    group.offset = offset;
    offset += group.blobs[0] + group.blobs[1] + group.blobs[2];
    for (let place = 0; place < group.sample.length; place++)
      run.rollouts.push(rolloutRow(group, place, run.rollouts.length));
    group.mixed = hasBothOutcomes(group);
    group.noGradient = hasNoGradient(group);
  }
  run.decoded = new Map();
  return run;
}

function rolloutRow(group, place, number) {
  return {
    number,
    group,
    place,
    step: group.step,
    source: group.source,
    prompt: group.prompt,
    answer: group.answer,
    sample: group.sample[place],
    reward: group.reward[place],
    outcome: outcomeOf(group, place),
    finish: group.finish[place],
    tokens: group.tokens[place],
    credit: group.credit[place],
    parsed: group.parsed[place],
  };
}

// Records from before verdicts had outcomes have a reward only.
function outcomeOf(group, place) {
  if (group.outcome[place]) return group.outcome[place];
  if (group.reward[place] === null) return "none";
  return group.reward[place] >= 0.5 ? "right" : "wrong";
}

function hasBothOutcomes(group) {
  const known = group.reward.filter((reward) => reward !== null);
  return known.some((reward) => reward >= 0.5) && known.some((reward) => reward < 0.5);
}

// Without advantages in the record equal rewards stand for them.
function hasNoGradient(group) {
  if (group.credit.some((credit) => credit !== null))
    return group.credit.every((credit) => !credit);
  return new Set(group.reward.filter((reward) => reward !== null)).size < 2;
}

function rolloutsOf(run, group) {
  return run.rollouts.slice(group.first, group.first + group.sample.length);
}

function blob(run, group, which) {
  let start = group.offset;
  for (let before = 0; before < which; before++) start += group.blobs[before];
  return run.blobText.slice(start, start + group.blobs[which]);
}

// Token places (see `vocabulary`) of the prompt and of the responses, and the mask.
async function groupTokens(run, group) {
  const bytes = await inflate(blob(run, group, 0));
  const numTokens = sum(group.tokens);
  const places = joinPlanes(bytes, group.promptTokens + numTokens, 3);
  return {
    prompt: places.subarray(0, group.promptTokens),
    responses: cut(group, places.subarray(group.promptTokens)),
    masks: cut(group, bytes.subarray(bytes.length - numTokens)),
  };
}

// All of a group that the viewer shows; kept, because j and k come back to it.
async function decodeGroup(run, group) {
  if (!run.decoded.has(group.number)) {
    const [tokens, numbers, details] = await Promise.all([
      groupTokens(run, group),
      inflate(blob(run, group, 1)),
      inflateJson(blob(run, group, 2)),
    ]);
    run.decoded.set(group.number, { ...tokens, details, series: groupSeries(run, group, numbers) });
  }
  return run.decoded.get(group.number);
}

function groupSeries(run, group, bytes) {
  const numTokens = sum(group.tokens);
  const planes = Math.ceil((9 + run.mantissa) / 8);
  const words = joinPlanes(bytes, numTokens * run.series.length, planes);
  for (let at = 0; at < words.length; at++) words[at] <<= 8 * (4 - planes);
  const numbers = new Float32Array(words.buffer);
  const found = run.series.map((name, place) => [
    name,
    cut(group, numbers.subarray(place * numTokens, (place + 1) * numTokens)),
  ]);
  return withDerived(Object.fromEntries(found));
}

function withDerived(series) {
  if (!series.gap) return series;
  const policy = series.logprob.map((engine, place) =>
    engine.map((value, at) => value + series.gap[place][at]),
  );
  return { ...series, policy_logprob: policy };
}

// The first plane has the highest byte of every word.
function joinPlanes(bytes, count, planes) {
  const words = new Uint32Array(count);
  for (let plane = 0; plane < planes; plane++) {
    const start = plane * count;
    for (let at = 0; at < count; at++) words[at] = (words[at] << 8) | bytes[start + at];
  }
  return words;
}

// The part of each rollout of an array over all tokens of a group.
function cut(group, array) {
  let start = 0;
  return group.tokens.map((length) => array.subarray(start, (start += length)));
}

function sum(numbers) {
  return numbers.reduce((total, value) => total + value, 0);
}
