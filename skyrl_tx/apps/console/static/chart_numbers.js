// The numbers of charts: smoothed values, and the range, labels and width of the y axis.

/* global uPlot */

export const FEW_POINTS = 20; // a curve of fewer points, for example of evaluations, is not smoothed
const LEAST_SPAN = 1e-3; // relative to the values: if ticks differed by less than rounding, uPlot would never return
const LARGEST = 1e300; // uPlot would overflow
const FEWEST_PX = 36;

function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

/** A value that can be drawn. */
export function limit(value) {
  return clamp(value, -LARGEST, LARGEST);
}

/** The exponential moving average, without the usual bias of its first values towards 0. */
export function smooth(values, weight) {
  if (values.length < FEW_POINTS) return values;
  let average = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    average = weight * average + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return average / total;
  });
}

/** The range from `low` to `high`, widened to a relative span of at least `span`. */
export function widen(low, high, span) {
  const missing = Math.max(0, span * Math.max(Math.abs(low), Math.abs(high)) - (high - low));
  return [low - missing / 2, high + missing / 2];
}

export function findRange(_, low, high) {
  if (low === null || low === undefined) return [null, null];
  if (low === 0 && high === 0) return [0, 1];
  return uPlot.rangeNum(...widen(low, high, LEAST_SPAN), 0.1, true);
}

/** Labels with as many digits as it takes to tell the ticks apart. */
export function labelTicks(plot, ticks, _, __, increment) {
  if (plot.scales.y.distr === 3) return ticks.map((tick) => (tick === null ? "" : format(tick)));
  const size = Math.max(...ticks.map(Math.abs));
  const isShort = size < 1e5 && size >= 1e-3;
  const power = (value) => Math.floor(Math.log10(value) + 1e-9);
  const isRound = Math.abs((increment / 10 ** power(increment)) % 1 - 0.5) > 0.1; // not 2.5
  const digits = clamp((isShort ? 0 : power(size)) - power(increment) + (isRound ? 0 : 1), 0, 12);
  return ticks.map((tick) => (tick === 0 ? "0" : isShort ? tick.toFixed(digits) : tick.toExponential(digits)));
}

/** The width of the axis in pixels, so that its longest label fits. */
export function measureAxis(plot, labels, index, cycle) {
  const axis = plot.axes[index];
  if (cycle > 1) return axis._size;
  plot.ctx.font = axis.font[0];
  const widths = (labels ?? []).map((label) => plot.ctx.measureText(label).width / devicePixelRatio);
  return Math.ceil(Math.max(FEWEST_PX, ...widths) + axis.ticks.size + axis.gap);
}

export function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}
