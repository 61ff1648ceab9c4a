// Search of guides and reference by Pagefind. If its index cannot be loaded, as from a file on a
// disk, Sphinx's own search stays.
import {OPTIONS, find} from "./find.js";

const place = document.getElementById("search-results");
const query = new URLSearchParams(location.search).get("q");

async function search() {
  const base = new URL("../", import.meta.url);
  const pagefind = await import(new URL("pagefind/pagefind.js", base));
  await pagefind.options(OPTIONS);
  const found = await find(pagefind, query);
  const results = await Promise.all(found.slice(0, 15).map((result) => result.data()));
  const list = document.createElement("ul");
  list.className = "found";
  for (const result of results) {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = result.url;
    link.textContent = result.meta.title;
    const excerpt = document.createElement("p");
    excerpt.innerHTML = result.excerpt; // of our own pages: text, and <mark>
    item.append(link, excerpt);
    list.append(item);
  }
  const count = document.createElement("p");
  count.textContent = `${found.length} pages for “${query}”`;
  const own = document.createElement("div");
  own.className = "found-here";
  own.append(count, list);
  place.replaceWith(own);
}

if (place && query) {
  search().catch((error) => console.log("Sphinx searches:", error));
}
