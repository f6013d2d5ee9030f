// How the page finds its elements and says numbers.

export const $ = (id) => document.getElementById(id);

export const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
export const seconds = (value) => (value < 1 ? `${number(value * 1000)} ms` : `${number(value, 2)} s`);

export function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${number(value, unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function list(target, rows) {
  target.replaceChildren(...rows.flatMap(([name, value]) => {
    const [term, text] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    text.textContent = value;
    return [term, text];
  }));
}

/** A class of style, of eight from little to all. */
export const shade = (share) => (share > 0 ? Math.max(1, Math.round(share * 8)) : 0);
