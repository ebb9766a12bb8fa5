// Prompts of the race. Answers that repeat their question are what lookup drafts best.

const CODE = `def invoice(items, rate):
    total = 0
    for item in items:
        price = item["price"] * item["count"]
        total = total + price
    tax = total * rate
    return {"total": total, "tax": tax, "sum": total + tax}


def show(result):
    print("total:", result["total"])
    print("tax:", result["tax"])
    print("sum:", result["sum"])`;

const PEOPLE = `Anna Berg lives in Oslo and is 34.
Ben Carter lives in Leeds and is 51.
Carla Diaz lives in Madrid and is 28.
David Egger lives in Graz and is 45.
Emma Fischer lives in Bonn and is 39.`;

export const EXAMPLES = [
  {
    title: "Rewrite code",
    max_tokens: "200",
    prompt: `Fix the spelling and the layout of this code, and change nothing else:\n\n${CODE}`,
  },
  {
    title: "Extract JSON",
    max_tokens: "220",
    prompt: `Write these people as a JSON list of objects with the fields "name", "city" and "age":\n\n${PEOPLE}`,
  },
  { title: "Plain chat", max_tokens: "150", prompt: "Why is the sky blue? Explain it to a child." },
];
