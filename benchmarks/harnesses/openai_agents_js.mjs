import { Agent, run, tool } from "@openai/agents";
import { readFileSync, writeFileSync } from "node:fs";
import { z } from "zod";

const prompt = JSON.parse(readFileSync(process.env.R3TRAIN_TASK_FILE, "utf8")).prompt;
const add = tool({
  name: "add",
  description: "Add two numbers.",
  parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const agent = new Agent({ name: "adder", instructions: "You add.", tools: [add] });
const made = await run(agent, prompt, { stream: process.argv[2] === "stream" });
if (made.completed) await made.completed;
console.log(made.finalOutput);
writeFileSync(process.env.R3TRAIN_REWARD_FILE, made.finalOutput.includes("3") ? "1" : "0");
