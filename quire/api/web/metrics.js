// Read /metrics, and compute rates and percentiles between two readings.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Return the samples of a text in Prometheus' format: a Map from name to [{ labels, value }]. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
  }
  return samples;
}

/** Return the sum of a metric over its labels; 0 if it has no samples. */
export const total = (samples, name) => (samples.get(name) ?? []).reduce((sum, { value }) => sum + value, 0);

/** Return the cumulative buckets of a histogram: [[upper bound, count]]. */
function buckets(samples, name) {
  return (samples.get(`${name}_bucket`) ?? []).map(({ labels, value }) => [Number(labels.le.replace("Inf", "Infinity")), value]);
}

/** Return { count, at } of a histogram since an earlier reading, or since the start without one.
 *  at(share): the percentile, interpolated within its bucket; null without observations. */
export function histogram(samples, name, before = null) {
  const earlier = new Map(before ? buckets(before, name) : []);
  const counts = buckets(samples, name).map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const count = counts.at(-1)?.[1] ?? 0;
  const at = (share) => {
    if (!count) return null;
    const wanted = share * count;
    let low = 0, below = 0;
    for (const [bound, upTo] of counts) {
      if (upTo >= wanted) {
        if (!Number.isFinite(bound)) return low;
        return low + (bound - low) * ((wanted - below) / Math.max(upTo - below, 1e-9));
      }
      [low, below] = [bound, upTo];
    }
    return low;
  };
  return { count, at };
}
