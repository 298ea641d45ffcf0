// Asks once, with as many retries as the argument says; prints the answer, or the class of the error.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: Number(process.argv[2]) });
try {
  const completion = await client.chat.completions.create({
    model: "smol-135m",
    messages: [{ role: "user", content: "Name three colours." }],
    max_tokens: 3,
    temperature: 0,
  });
  console.log(completion.choices[0].message.content);
} catch (error) {
  console.log(error.constructor.name);
}
