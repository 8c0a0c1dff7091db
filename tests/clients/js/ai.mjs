// Vercel's AI SDK: the default model of its OpenAI provider (Responses), and Anthropic's provider.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.env.URL}/v1`;
const models = {
  openai: createOpenAI({ baseURL, apiKey: "none" })(process.env.MODEL),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })(process.env.MODEL),
};
const found = {};
for (const [name, model] of Object.entries(models)) {
  if (process.env.TOOLS) {
    const cities = [];
    const weather = tool({
      description: "Tells the weather.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        cities.push(city);
        return "cold";
      },
    });
    const answer = await generateText({
      model,
      prompt: "Where is it cold?",
      tools: { weather },
      stopWhen: stepCountIs(4),
      maxRetries: 0,
    });
    found[name] = { cities, text: answer.text, steps: answer.steps.length };
    continue;
  }
  const asked = { model, prompt: "Who is Tom?", maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
  const whole = await generateText(asked);
  let streamed = "";
  for await (const part of streamText(asked).textStream) streamed += part;
  found[name] = { whole: whole.text, streamed, tokens: whole.usage.outputTokens };
}
console.log(JSON.stringify(found));
