// What is refused, and how: the error's class, its field and its code.  npm install openai
// OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none node openai_errors.mjs
import OpenAI from "openai";

// A full server answers 429 with Retry-After, which the client waits for; after so many tries it is a RateLimitError.
const client = new OpenAI({ maxRetries: 5 });

for (const fields of [{ temperature: 3 }, { max_tokens: 1_000_000 }, { model: "gpt-4o" }, { n: 2 }]) {
  try {
    await client.chat.completions.create({
      model: "smol-135m",
      messages: [{ role: "user", content: "Hi" }],
      ...fields,
    });
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    console.log(error.constructor.name, error.status, error.param, error.code);
  }
}
