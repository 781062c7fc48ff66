// Bars of a latency histogram; those beyond the objective are red.
function seconds(value) {
  return value < 1 ? `${+(value * 1000).toFixed(1)}ms` : `${value}s`;
}

export function drawHistogram(root, buckets, counts, objective) {
  const most = Math.max(...counts, 1);
  const total = counts.reduce((sum, count) => sum + count, 0);
  const bars = buckets.map((bucket, i) => {
    const bar = document.createElement("div");
    const fill = document.createElement("i");
    const label = document.createElement("span");
    const late = objective !== null && (bucket.bound === null || bucket.bound > objective);
    bar.className = `bar ${objective === null ? "plain" : late ? "late" : ""}`;
    bar.title = `${counts[i]} up to ${bucket.bound === null ? "any time" : seconds(bucket.bound)}`;
    fill.style.height = `${(counts[i] / most) * 80}%`;
    label.textContent = bucket.bound === null ? "more" : seconds(bucket.bound);
    bar.append(fill, label);
    return bar;
  });
  root.replaceChildren(...bars);
  const told = objective === null ? "" : `, objective ${seconds(objective)}`;
  root.setAttribute("aria-label", `${total} requests${told}; most of them up to ${peak(buckets, counts)}`);
}

function peak(buckets, counts) {
  const bound = buckets[counts.indexOf(Math.max(...counts))].bound;
  return bound === null ? "any time" : seconds(bound);
}
