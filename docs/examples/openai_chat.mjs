// A chat, and what it cost in tokens.  npm install openai
// OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none node openai_chat.mjs
import OpenAI from "openai";

const client = new OpenAI();
const completion = await client.chat.completions.create({
  model: "smol-135m",
  messages: [
    { role: "system", content: "Answer in one sentence." },
    { role: "user", content: "What is the capital of France?" },
  ],
  max_tokens: 32,
  temperature: 0,
});
console.log(completion.choices[0].message.content);
const { prompt_tokens, completion_tokens } = completion.usage;
console.log(`${prompt_tokens} tokens of prompt, ${completion_tokens} of answer`);
