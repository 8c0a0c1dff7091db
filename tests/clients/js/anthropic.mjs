// Anthropic's client: messages whole and streamed, with a cached prefix, a batch, an error.

import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.URL, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const system = [
  { type: "text", text: "Tom is a cat. ".repeat(12), cache_control: { type: "ephemeral" } },
];
const messages = [{ role: "user", content: "Who is Tom?" }];
const asked = { model, system, messages, max_tokens: 24 };

const whole = await client.messages.create({ ...asked, seed: 3 });
const again = await client.messages.create({ ...asked, seed: 3 });
const stream = client.messages.stream({ ...asked, seed: 3 });
const final = await stream.finalMessage();
const made = await client.messages.batches.create({
  requests: [
    { custom_id: "one", params: { ...asked, seed: 3 } },
    { custom_id: "two", params: { ...asked, temperature: 2 } },
  ],
});
let batch = made;
while (batch.processing_status !== "ended") {
  await new Promise((resolve) => setTimeout(resolve, 50));
  batch = await client.messages.batches.retrieve(made.id);
}
const results = {};
for await (const line of await client.messages.batches.results(made.id)) {
  results[line.custom_id] = line.result;
}
await client.messages.batches.delete(made.id);
let error = null;
try {
  await client.messages.create({ ...asked, temperature: 2 });
} catch (refused) {
  error = { name: refused.constructor.name, status: refused.status };
}
console.log(
  JSON.stringify({
    whole: whole.content[0].text,
    streamed: final.content[0].text,
    first: whole.usage,
    second: again.usage,
    counts: batch.request_counts,
    one: results.one.message.content[0].text,
    two: results.two.type,
    error,
  }),
);
