// Begins a story; told to, leaves it, and lives on until its input ends.
import { createInterface } from "node:readline";
import OpenAI from "openai";

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const stream = await new OpenAI().chat.completions.create({
  model: "smol-135m",
  messages: [{ role: "user", content: "Tell me a story." }],
  temperature: 0,
  stream: true,
});
for await (const _ of stream) {
  console.log("reading");
  await lines.next();
  break;
}
console.log("left");
await lines.next();
