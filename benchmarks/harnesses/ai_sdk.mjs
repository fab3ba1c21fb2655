import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { readFileSync, writeFileSync } from "node:fs";
import { z } from "zod";

const [how, mode] = process.argv.slice(2);
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, OPENAI_MODEL: name } = process.env;
const prompt = JSON.parse(readFileSync(process.env.R3TRAIN_TASK_FILE, "utf8")).prompt;
const model = {
  responses: () => createOpenAI({ baseURL, apiKey })(name),
  chat: () => createOpenAI({ baseURL, apiKey }).chat(name),
  compatible: () => createOpenAICompatible({ name: "r3", baseURL, apiKey })(name),
  anthropic: () => createAnthropic({ baseURL, apiKey })(name),
}[how]();
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});
const asked = { model, prompt, tools: { add }, stopWhen: stepCountIs(4) };
const text = mode === "stream" ? await streamText(asked).text : (await generateText(asked)).text;
console.log(text);
writeFileSync(process.env.R3TRAIN_REWARD_FILE, text.includes("3") ? "1" : "0");
