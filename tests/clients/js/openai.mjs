// OpenAI's client: chats and responses, whole and streamed, an error. Prints what was received.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Who is Tom?" }];
const chat = { model, messages, max_tokens: 24, seed: 3 };
const asked = { model, input: "Who is Tom?", max_output_tokens: 24, seed: 3 };

const whole = await client.chat.completions.create(chat);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const response = await client.responses.create(asked);
const types = [];
for await (const event of client.responses.stream(asked)) types.push(event.type);
const conversation = await client.conversations.create({ metadata: { topic: "Tom" } });
await client.responses.create({ ...asked, conversation: conversation.id });
const items = [];
for await (const item of client.conversations.items.list(conversation.id, { order: "asc" })) {
  items.push(item.type);
}
let error = null;
try {
  await client.chat.completions.create({ ...chat, temperature: -1 });
} catch (refused) {
  error = { name: refused.constructor.name, status: refused.status, param: refused.param };
}
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    response: response.output_text,
    types,
    items,
    error,
  }),
);
