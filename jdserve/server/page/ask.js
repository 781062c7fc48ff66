// Requests to this server, with the key of this tab.
const KEY = "jdserve key";

export class KeyNeeded extends Error {}

export function setKey(key) {
  sessionStorage.setItem(KEY, key.trim());
}

// An answer that is good; else an error with the server's own words.
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) throw new KeyNeeded("this server needs an API key");
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answered ${answer.status}`);
  }
  return answer;
}
