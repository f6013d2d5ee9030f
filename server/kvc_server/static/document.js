// The document that the page begins with.

/** Sentences that any model reads, and the embedded one too, with codes among them; always the same. */
export function writeDocument() {
  const words = [
    "the this every our", "old quiet small bright narrow gentle distant busy calm warm dusty proud",
    "river village garden market bridge mountain forest harbor library painter driver neighbor",
    "waits rests moves turns sleeps walks listens shines drifts leans lingers appears",
    "near behind beside under across along around beyond inside through toward upon",
  ].map((each) => each.split(" "));
  const codes = [
    "white otter is mike nine lima", "red falcon is tango seven kilo",
    "green badger is papa two echo", "black heron is golf five oscar",
  ].map((each) => `the code for ${each} .`);
  let state = 7;
  const pick = (from) => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return from[Math.floor((state / 2147483648) * from.length)];
  };
  const sentence = () => [0, 1, 2, 3, 4, 0, 1, 2].map((kind) => pick(words[kind])).join(" ") + " .";
  const lines = Array.from({ length: 80 }, sentence);
  codes.forEach((code, index) => lines.splice(10 + 20 * index, 0, code));
  return lines.join(" ");
}
