#include "chart_script.h"

namespace kv4::cli {

// A chart is redrawn for every page width and every range: [low, high] of x, or of a bar chart's values.
const char* const kChartScript = R"js(
'use strict';
const short = value => Number(value.toPrecision(3)).toLocaleString('en');
function scaled(value, base, names) {
  let i = 0;
  while (Math.abs(value) >= base * 0.9995 && i + 1 < names.length) {
    value /= base;
    ++i;
  }
  return (i ? short(value) : Number(value.toFixed(2)).toLocaleString('en')) + names[i];
}
function format(value, unit) {
  if (value === null) return 'none';
  if (unit == 'bytes') return scaled(value, 1000, [' B', ' KB', ' MB', ' GB', ' TB', ' PB', ' EB']);
  if (unit == 'tokens') return scaled(value, 1024, ['', 'K', 'M', 'G', 'T']);
  if (unit == 'share') return Number((100 * value).toFixed(1)) + ' %';
  if (unit == 'seconds')
    return value == 0 ? '0 s' :
        value < 1e-6  ? short(value * 1e9) + ' ns' :
        value < 1e-3  ? short(value * 1e6) + ' us' :
        value < 1     ? short(value * 1e3) + ' ms' :
                        short(value) + ' s';
  return Number(value.toFixed(2)).toLocaleString('en');
}
// With every digit where the short form has lost some.
function formatWhole(value, unit) {
  if (value === null || unit == 'share' || unit == 'seconds') return format(value, unit);
  const whole = Number(value.toFixed(2)).toLocaleString('en');
  return unit == 'bytes' ? value < 1000 ? whole + ' B' : `${format(value, unit)} (${whole} bytes)` :
      unit == 'tokens' ? whole + ' tokens' :
                         whole;
}
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
const drawing = make('template', {innerHTML: '<svg></svg>'}).content.firstChild.namespaceURI;
function draw(parent, tag, attributes, text) {
  const element = document.createElementNS(drawing, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name == 'fill' || name == 'stroke') element.style[name] = value;
    else
      element.setAttribute(name, value);
  }
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
// Round ones, at most `most`: 1, 2 or 5 times a power of ten; powers of two for tokens.
function ticks(low, high, most, unit) {
  const raw = Math.max((high - low) / Math.max(most, 1), 1e-12), power = 10 ** Math.floor(Math.log10(raw));
  const step = unit == 'tokens' ? 2 ** Math.ceil(Math.log2(raw)) :
                                  power * [1, 2, 5, 10].find(factor => raw <= factor * power * (1 + 1e-9));
  const places = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) places.push(i * step);
  return unit == 'count' ? places.filter(Number.isInteger) : places;
}
// A group at (x, y) of which only so much is seen.
let cuts = 0;
function cut(svg, x, y, width, height) {
  const id = `cut${++cuts}`;
  draw(draw(svg, 'clipPath', {id}), 'rect', {width: Math.max(0, width), height});
  return draw(svg, 'g', {'clip-path': `url(#${id})`, transform: `translate(${x} ${y})`});
}
const shownValues = (series, first, last) => series.values.slice(first, last + 1).map(value => value ?? 0);

function chart(figure, data) {
  const plot = figure.querySelector('.plot'), bars = data.type == 'bars';
  const tip = make('div', {className: 'tip', hidden: true}),
        reset = make('button', {className: 'reset', type: 'button', textContent: 'whole range', hidden: true});
  const left = bars ? 132 : 76, right = 22, state = {range: null, at: null, drag: null};
  let width = 0, svg = null, area = null;
  tip.setAttribute('aria-live', 'polite');
  plot.replaceChildren(tip, reset);

  // Of the values of x, or of even places 0, 1, ...; of a bar chart's values.
  const places = () => bars ? [] : data.x.even ? data.x.values.map((_, i) => i) : data.x.values;
  function whole() {
    if (bars)
      return [
        0,
        (data.high ||
         Math.max(0, ...data.bars.map(bar => bar.parts.reduce((sum, part) => sum + part.value, 0))) * 1.2) ||
            1
      ];
    const all = places();
    if (data.x.even) return [-0.5, Math.max(all.length, 1) - 0.5];
    const low = all.length ? all[0] : 0, high = all.length ? all[all.length - 1] : 1;
    return high > low ? [low, high] : [low - 0.5, low + 0.5];
  }
  const range = () => state.range ?? whole();
  const toPixel = value => left + (value - range()[0]) / (range()[1] - range()[0]) * (width - left - right);
  const toValue = pixel => range()[0] + (pixel - left) / (width - left - right) * (range()[1] - range()[0]);
  function nearest(value) {
    let best = null;
    places().forEach((place, i) => {
      if (best === null || Math.abs(place - value) < Math.abs(places()[best] - value)) best = i;
    });
    return best;
  }
  // A narrower range has nothing to show: two places, or a millionth.
  function zoom(low, high) {
    const [first, last] = whole(), all = places(),
                  least = bars || all.length < 2 ? (last - first) / 1e6 : (last - first) / (all.length - 1 || 1);
    low = Math.max(first, low);
    high = Math.min(last, high);
    if (high - low < least) {
      const middle = (low + high) / 2;
      low = Math.max(first, Math.min(middle - least / 2, last - least));
      high = Math.min(last, low + least);
    }
    state.range = high - low >= (last - first) * 0.999 ? null : [low, high];
    redraw();
  }

  function drawX(svg, top, bottom) {
    const unit = bars ? data.unit : data.x.unit, most = Math.max(3, Math.floor((width - left - right) / 66));
    const every =
        Math.ceil(54 / (width - left - right) * (range()[1] - range()[0]));  // of even places: so that labels have room
    const shown = bars || !data.x.even ?
        ticks(...range(), most, unit) :
        places().filter(place => place >= range()[0] && place <= range()[1] && place % every == 0);
    for (const value of shown) {
      const at = toPixel(value);
      if (bars) draw(svg, 'line', {class: 'grid', x1: at, x2: at, y1: top, y2: bottom});
      const of = bars || !data.x.even ? value : data.x.values[value];
      draw(svg, 'text', {class: 'tick middle', x: at, y: bottom + 16}, format(of, unit));
      if (!bars && data.x.bytes_per_token)
        draw(
            svg, 'text', {class: 'tick middle faint', x: at, y: bottom + 31},
            format(of * data.x.bytes_per_token, 'bytes'));
    }
    draw(
        svg, 'text',
        {class: 'tick middle', x: (left + width - right) / 2, y: bottom + (!bars && data.x.bytes_per_token ? 49 : 34)},
        bars ? data.label : data.x.label);
  }

  function drawPanel(svg, panel, top, bottom) {
    const [low, high] = range(), all = places();
    let first = all.findIndex(place => place >= low), last = all.length - 1;
    while (last > 0 && all[last] > high) --last;
    first = first < 0 ? 0 : Math.max(0, first - 1);
    last = Math.min(all.length - 1, last + 1);
    const shown = panel.series.map(series => shownValues(series, first, last));
    const tops = panel.marks == 'stack' && shown.length ?
        shown[0].map((_, i) => shown.reduce((sum, values) => sum + values[i], 0)) :
        shown.flat();
    const most = panel.high || Math.max(0, ...tops) * 1.05 || 1,
          toY = value => bottom - Math.min(value, most) / most * (bottom - top);
    for (const value of ticks(0, most, Math.max(2, Math.floor((bottom - top) / 32)), panel.unit)) {
      draw(svg, 'line', {class: 'grid', x1: left, x2: width - right, y1: toY(value), y2: toY(value)});
      draw(svg, 'text', {class: 'tick end', x: left - 6, y: toY(value) + 4}, format(value, panel.unit));
    }
    draw(
        svg, 'text', {class: 'tick middle', transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)`}, panel.label);
    // What lies outside the range is cut off, and half a line's width is not.
    const inside = cut(svg, left, top - 4, width - left - right, bottom - top + 4);
    const x = i => toPixel(all[i]) - left, y = value => toY(value) - top + 4, below = all.map(() => 0);
    panel.series.forEach((series, number) => {
      const named = {class: 'series', 'data-name': series.name, ...(series.id ? {id: series.id} : {})}, points = [];
      for (let i = first; i <= last; ++i)
        if (series.values[i] !== null && series.values[i] !== undefined) points.push(i);
      if (panel.marks == 'groups') {
        const step = (width - left - right) / (high - low), wide = step * 0.8 / panel.series.length;
        for (const i of points)
          draw(inside, 'rect', {
            ...named,
            fill: series.color,
            x: x(i) - step * 0.4 + number * wide,
            width: wide * 0.92,
            y: y(series.values[i]),
            height: Math.max(0, y(0) - y(series.values[i]))
          });
        return;
      }
      if (panel.marks == 'stack') {
        const upper = below.map((sum, i) => sum + (series.values[i] ?? 0)), indices = [];
        for (let i = first; i <= last; ++i) indices.push(i);
        const line = indices.map(i => `${x(i).toFixed(1)},${y(upper[i]).toFixed(1)}`),
              back = indices.reverse().map(i => `${x(i).toFixed(1)},${y(below[i]).toFixed(1)}`);
        draw(inside, 'polygon', {...named, fill: series.color, points: [...line, ...back].join(' ')});
        upper.forEach((sum, i) => {
          below[i] = sum;
        });
        return;
      }
      let run = [];
      const wide = panel.series.length > 1 && !series.dashed ? 5 : 2;
      const end = () => {
        if (run.length == 1)
          draw(inside, 'circle', {...named, fill: series.color, cx: x(run[0]), cy: y(series.values[run[0]]), r: 3});
        else if (run.length)
          draw(inside, 'polyline', {
            ...named,
            stroke: series.color,
            'stroke-width': wide,
            'stroke-dasharray': series.dashed ? '5 4' : 'none',
            points: run.map(i => `${x(i).toFixed(1)},${y(series.values[i]).toFixed(1)}`).join(' ')
          });
        run = [];
      };
      for (let i = first; i <= last; ++i)
        if (points.includes(i)) run.push(i);
        else
          end();
      end();
    });
    return {panel, toY};
  }

  function drawBars(svg, top) {
    const inside = cut(svg, left, top, width - left - right, data.bars.length * 30);
    data.bars.forEach((bar, row) => {
      const most = Math.floor(left / 7),
            name = bar.name.length > most ? bar.name.slice(0, most - 1) + '\u2026' : bar.name;
      draw(svg, 'text', {class: 'tick end', x: left - 6, y: top + row * 30 + 18}, name);
      let sum = 0;
      for (const part of bar.parts) {
        const from = toPixel(sum) - left, to = toPixel(sum += part.value) - left,
              thick = Math.max(part.value > 0 ? 1 : 0, to - from);
        // What is far out of the range would be drawn at coordinates that renderers round.
        const begin = Math.max(-10, from), finish = Math.min(width + 10, from + thick);
        if (finish > begin)
          draw(inside, 'rect', {
            class: 'series',
            'data-name': part.name,
            fill: part.color,
            x: begin,
            y: row * 30 + 3,
            width: finish - begin,
            height: 22
          });
      }
      if (bar.parts.length != 1) return;
      const words = format(sum, data.unit), end = toPixel(sum) - left,
            fits = end + 8 + words.length * 7.5 < width - left - right;
      if (end >= 0)
        draw(
            inside, 'text', {
              class: fits ? 'tick value' : 'tick value end on',
              x: fits ? Math.max(end, 0) + 6 : Math.min(end, width - left - right) - 6,
              y: row * 30 + 18
            },
            words);
    });
  }

  function redraw() {
    width = plot.clientWidth || 560;
    const top = 8, xAxis = !bars && data.x.bytes_per_token ? 56 : 42,
          each = bars          ? 0 :
        data.panels.length > 1 ? 118 :
                                 210;
    const bottom = bars ? top + data.bars.length * 30 : top + data.panels.length * each + (data.panels.length - 1) * 16;
    svg?.remove();
    svg = draw(plot, 'svg', {viewBox: `0 0 ${width} ${bottom + xAxis}`, height: bottom + xAxis});
    drawX(svg, top, bottom);
    if (bars) drawBars(svg, top);
    else
      data.panels.forEach((panel, i) => drawPanel(svg, panel, top + i * (each + 16), top + i * (each + 16) + each));
    area = {top, bottom};
    reset.hidden = state.range === null;
    plot.dataset.low = range()[0];
    plot.dataset.high = range()[1];
    if (state.at !== null) point(state.at);
  }

  // `at`: a place's number, or {row, value} of a bar chart.
  function point(at) {
    svg.querySelectorAll('.cross, .chosen').forEach(mark => mark.remove());
    state.at = at;
    tip.hidden = at === null;
    if (at === null) return;
    let pixel, words;
    if (bars) {
      const bar = data.bars[at.row], all = bar.parts.reduce((sum, part) => sum + part.value, 0);
      let sum = 0, part = bar.parts.find(part => (sum += part.value) >= at.value) ?? bar.parts[bar.parts.length - 1];
      pixel = toPixel(at.value);
      draw(
          svg, 'rect',
          {class: 'chosen', x: left, y: area.top + at.row * 30 + 1, width: width - left - right, height: 26});
      words = !part ? [[null, bar.name]] : [[
        part.color,
        bar.parts.length > 1 ?
            `${part.name}: ${formatWhole(part.value, data.unit)}, ${format(all ? part.value / all : 0, 'share')}` :
            `${bar.name}: ${formatWhole(part.value, data.unit)}`
      ]];
    } else {
      const value = data.x.values[at];
      pixel = toPixel(places()[at]);
      draw(svg, 'line', {class: 'cross', x1: pixel, x2: pixel, y1: area.top, y2: area.bottom});
      words = [[
        null,
        `${data.x.label}: ${formatWhole(value, data.x.unit)}` +
            (data.x.bytes_per_token ? `, ${format(value * data.x.bytes_per_token, 'bytes')} of ${data.x.bytes_of}` : '')
      ]];
      for (const panel of data.panels)
        for (const series of panel.series)
          words.push([series.color, `${series.name}: ${formatWhole(series.values[at] ?? null, panel.unit)}`]);
    }
    tip.replaceChildren(...words.map(([color, text]) => {
      const line = make('div');
      if (color) {
        const mark = make('i');
        mark.style.background = color;
        line.append(mark);
      }
      line.append(text);
      return line;
    }));
    tip.style.left = Math.max(0, Math.min(pixel + 12, width - tip.offsetWidth - 4)) + 'px';
    if (pixel + 12 + tip.offsetWidth > width && pixel - 12 - tip.offsetWidth > 0)
      tip.style.left = pixel - 12 - tip.offsetWidth + 'px';
    tip.style.top = bars ? area.top + at.row * 30 + 32 + 'px' : area.top + 4 + 'px';
  }
  function pointAt(x, y) {
    if (bars) {
      const row = Math.floor((y - area.top) / 30);
      point(data.bars.length && row >= 0 && row < data.bars.length ? {row, value: Math.max(0, toValue(x))} : null);
    } else {
      point(nearest(toValue(x)));
    }
  }
  const place = event => {
    const box = plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const clear = () => {
    state.drag = null;
    svg.querySelector('.selection')?.remove();
  };

  plot.addEventListener('pointerdown', event => {
    if (event.target == reset || event.button) return;
    state.drag = Math.max(left, Math.min(width - right, place(event)[0]));
    plot.setPointerCapture(event.pointerId);
    pointAt(...place(event));
  });
  plot.addEventListener('pointermove', event => {
    const [x, y] = place(event);
    pointAt(x, y);
    if (state.drag === null) return;
    svg.querySelector('.selection')?.remove();
    const to = Math.max(left, Math.min(width - right, x));
    draw(svg, 'rect', {
      class: 'selection',
      x: Math.min(to, state.drag),
      width: Math.abs(to - state.drag),
      y: area.top,
      height: area.bottom - area.top
    });
  });
  plot.addEventListener('pointerup', event => {
    if (state.drag === null) return;
    const ends = [state.drag, Math.max(left, Math.min(width - right, place(event)[0]))].sort((a, b) => a - b);
    clear();
    if (ends[1] - ends[0] > 8) zoom(toValue(ends[0]), toValue(ends[1]));
  });
  plot.addEventListener('pointercancel', clear);
  plot.addEventListener('pointerleave', event => {
    if (state.drag === null && event.pointerType == 'mouse') point(null);
  });
  plot.addEventListener('dblclick', () => zoom(...whole()));
  reset.addEventListener('click', () => zoom(...whole()));
  plot.addEventListener('blur', () => point(null));
  plot.addEventListener('keydown', event => {
    const [low, high] = range(), span = high - low,
                move = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1}[event.key];
    if (event.ctrlKey || event.altKey || event.metaKey || event.target == reset) return;
    if (move && bars) {
      let at = state.at ?? {row: 0, value: 0};
      if (event.key == 'ArrowUp' || event.key == 'ArrowDown')
        at = {row: Math.max(0, Math.min(data.bars.length - 1, state.at ? at.row + move : 0)), value: at.value};
      else
        at = {row: at.row, value: Math.max(low, Math.min(high, at.value + move * span / 50))};
      if (data.bars.length) point(at);
    } else if (move) {
      const inside = places().map((_, i) => i).filter(i => places()[i] >= low && places()[i] <= high);
      if (!inside.length) return;
      point(state.at === null ? inside[0] : Math.max(inside[0], Math.min(inside[inside.length - 1], state.at + move)));
    } else if (event.key == '+' || event.key == '=' || event.key == '-') {
      const at = state.at === null ? (low + high) / 2 :
          bars                     ? state.at.value :
                                     places()[state.at],
            factor = event.key == '-' ? 2 : 0.5;
      zoom(at - (at - low) * factor, at + (high - at) * factor);
    } else if (event.key == '0' || event.key == 'Escape') {
      zoom(...whole());
    } else {
      return;
    }
    event.preventDefault();
  });
  redraw();
  new ResizeObserver(() => {
    if (plot.clientWidth && plot.clientWidth != width) redraw();
  }).observe(plot);
  return {
    set(next) {
      data = next;
      if (state.range && !bars)
        state.range = [Math.max(state.range[0], whole()[0]), Math.min(state.range[1], whole()[1])];
      if (typeof state.at == 'number' && state.at >= places().length) state.at = null;
      redraw();
    }
  };
}
function drawCharts() {
  const figures = document.querySelectorAll('figure.chart');
  for (const figure of figures) chart(figure, JSON.parse(figure.querySelector('script').textContent));
  document.body.dataset.plots = figures.length;
}
)js";

}  // namespace kv4::cli
