// Leaving an answer in the middle: leaving the loop frees what the stream held on the server.  npm install openai
// OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none node openai_cancel.mjs
import OpenAI from "openai";

const client = new OpenAI();
const stream = await client.chat.completions.create({
  model: "smol-135m",
  messages: [{ role: "user", content: "Tell me a story." }],
  temperature: 0,
  stream: true,
});
let text = "";
for await (const chunk of stream) {
  text += chunk.choices[0].delta.content ?? "";
  if (text.length >= 20) break;
}
console.log(text);
