// What a reader types is a question more often than it is a text of the book: small words are left
// out, and where few pages have all of the other words, pages that have some of them follow.
const SMALL = new Set("a an and can do does for from how i in is it my of on or the to use with".split(" "));
const ENOUGH = 5;

export const OPTIONS = {ranking: {termFrequency: 0.6, pageLength: 0.6}};

export async function find(pagefind, query) {
  const typed = query.split(/\s+/).filter(Boolean);
  const words = typed.filter((word) => !SMALL.has(word.toLowerCase()));
  const {results} = await pagefind.search((words.length ? words : typed).join(" "));
  if (results.length >= ENOUGH || words.length < 2) return results;
  const some = new Map();
  for (const word of words) {
    for (const result of (await pagefind.search(word)).results) {
      const known = some.get(result.id) ?? {result, words: 0, score: 0};
      some.set(result.id, {result, words: known.words + 1, score: known.score + result.score});
    }
  }
  const whole = new Set(results.map((result) => result.id));
  const rest = [...some.values()].filter(({result}) => !whole.has(result.id));
  rest.sort((a, b) => b.words - a.words || b.score - a.score);
  return [...results, ...rest.map(({result}) => result)];
}
