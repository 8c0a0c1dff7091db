// LangChain's client of OpenAI: invoke, stream, and tools bound to a model.

import { ChatOpenAI } from "@langchain/openai";

const configuration = { baseURL: `${process.env.URL}/v1` };
const options = { model: process.env.MODEL, apiKey: "none", maxRetries: 0, configuration };
const found = {};
if (process.env.TOOLS) {
  const weather = {
    type: "function",
    function: {
      name: "weather",
      description: "Tells the weather.",
      parameters: { type: "object", properties: { city: { type: "string" } } },
    },
  };
  const answer = await new ChatOpenAI(options).bindTools([weather]).invoke("Where is it cold?");
  found.calls = answer.tool_calls.map((call) => [call.name, call.args]);
} else {
  const chat = new ChatOpenAI({ ...options, maxTokens: 24, temperature: 0 });
  found.whole = (await chat.invoke("Who is Tom?")).content;
  found.streamed = "";
  for await (const chunk of await chat.stream("Who is Tom?")) found.streamed += chunk.content;
}
console.log(JSON.stringify(found));
