import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { readFileSync, writeFileSync } from "node:fs";
import { z } from "zod";

const prompt = JSON.parse(readFileSync(process.env.R3TRAIN_TASK_FILE, "utf8")).prompt;
const add = tool(({ a, b }) => String(a + b), {
  name: "add",
  description: "Add two numbers.",
  schema: z.object({ a: z.number(), b: z.number() }),
});
const { OPENAI_BASE_URL: baseURL, OPENAI_MODEL: model } = process.env;
const chat = new ChatOpenAI({ model, configuration: { baseURL } });
const made = await createAgent({ model: chat, tools: [add] }).invoke({
  messages: [{ role: "user", content: prompt }],
});
const text = String(made.messages.at(-1).content);
console.log(text);
writeFileSync(process.env.R3TRAIN_REWARD_FILE, text.includes("3") ? "1" : "0");
