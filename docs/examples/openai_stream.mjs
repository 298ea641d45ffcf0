// An answer as it is written, and its cost at the end.  npm install openai
// OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none node openai_stream.mjs
import OpenAI from "openai";

const client = new OpenAI();
const stream = await client.chat.completions.create({
  model: "smol-135m",
  messages: [{ role: "user", content: "Name three colours." }],
  max_tokens: 32,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const { choices, usage } of stream) {
  process.stdout.write(choices[0]?.delta.content ?? "");
  if (usage) console.log(`\n${usage.prompt_tokens} tokens of prompt, ${usage.completion_tokens} of answer`);
}
