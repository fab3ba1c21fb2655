import { openai } from "@ai-sdk/openai";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { readFileSync, writeFileSync } from "node:fs";
import { z } from "zod";

const prompt = JSON.parse(readFileSync(process.env.R3TRAIN_TASK_FILE, "utf8")).prompt;
const add = createTool({
  id: "add",
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async (given) => (given.context ?? given).a + (given.context ?? given).b,
});
const agent = new Agent({
  id: "adder",
  name: "adder",
  instructions: "You add.",
  model: openai(process.env.OPENAI_MODEL),
  tools: { add },
});
const { text } = await agent.generate(prompt);
console.log(text);
writeFileSync(process.env.R3TRAIN_REWARD_FILE, text.includes("3") ? "1" : "0");
