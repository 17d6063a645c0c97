"""The page's CSS: light and dark by the reader's system, one column on a telephone.

Colours are variables, which script.py reads.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b2430; --muted: #5b6878; --line: #dfe4ea; --grid: #edf0f4; --accent: #2a6fdb;
  --good: #127a4b; --bad: #b8442a; --warn: #fff6e0; --warn-line: #e3b04b; --row: 20px;
  --c0: #2a6fdb; --c1: #1f9d63; --c2: #d98a00; --c3: #8b5cd6; --c4: #159aa8; --c5: #7b8794; --c6: #cf5791; --c7: #e2694d;
  --c8: #a3b018; --up: 42, 111, 219; --down: 226, 105, 77; --age: 139, 92, 214; --sure: 31, 157, 99;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e131a; --card: #161d27; --text: #e3e8ef; --muted: #93a1b3; --line: #2a3442; --grid: #222b38; --accent: #6ea5ff;
    --good: #55c98e; --bad: #f08a6f; --warn: #2b2413; --warn-line: #8f6a1d;
    --c0: #6ea5ff; --c1: #4cc38a; --c2: #f0b046; --c3: #b592f5; --c4: #4fc3d0; --c5: #8d9aab; --c6: #ee86b7; --c7: #f58b72;
    --c8: #cbd64f; --up: 110, 165, 255; --down: 245, 139, 114; --age: 181, 146, 245; --sure: 76, 195, 138;
  }
}
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
main, .top { max-width: 1240px; margin: 0 auto; padding: 0 20px }
.top { padding-top: 26px }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere }
h2 { font-size: 19px; margin: 38px 0 2px; text-transform: capitalize } h2 + p { margin: 0 0 12px; color: var(--muted) }
h3 { font-size: 15px; margin: 22px 0 8px }
.verdict { font-size: 17px; margin: 14px 0 4px } .verdict::first-letter { text-transform: uppercase }
.sub { color: var(--muted); margin: 0 } .sub b { color: var(--text); font-weight: 500 }
nav { position: sticky; top: 0; z-index: 5; background: var(--page); border-bottom: 1px solid var(--line); margin-top: 14px }
nav div { max-width: 1240px; margin: 0 auto; padding: 9px 20px; display: flex; gap: 18px; overflow-x: auto;
  scrollbar-width: none }
nav a { color: var(--muted); text-decoration: none; white-space: nowrap } nav a:hover { color: var(--accent) }
section { scroll-margin-top: 44px }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(188px, 1fr)); gap: 12px; margin: 18px 0 }
.tile, .chart, .sample, .lanes, .panel { background: var(--card); border: 1px solid var(--line); border-radius: 10px }
.tile { padding: 13px 15px; display: flex; flex-direction: column; gap: 1px }
.tile b, .chart h4, .sample h4 { font-weight: 500; font-size: 13px; color: var(--muted); margin: 0 }
.tile strong { font-size: 20px; font-weight: 620; letter-spacing: -0.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums }
.tile small { color: var(--muted); line-height: 1.35 } .tile.wide { grid-column: 1 / -1 }
.stack { display: flex; height: 14px; border-radius: 7px; overflow: hidden; background: var(--grid); margin: 7px 0 8px;
  min-width: 90px }
.phases, .numbers { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0; padding: 0; font-size: 13px }
.phases i, .dot { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); gap: 12px }
.chart { padding: 12px 14px 4px; min-width: 0; display: flex; flex-direction: column }
.chart h4 { color: var(--text); font-size: 14.5px; font-weight: 600 }
.chart p { margin: 0; font-size: 13px; line-height: 1.4; color: var(--muted) }
.chart .plot { height: 212px; margin-top: auto; width: 100%; min-width: 0; overflow: hidden }
.chart ul { list-style: none; margin: 5px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 1px 12px; font-size: 12.5px }
.chart li i { display: inline-block; width: 14px; height: 0; border-top: 3px solid; margin-right: 5px; vertical-align: middle }
.numbers { margin-top: 12px; gap: 7px } .numbers li { padding: 3px 10px; border: 1px solid var(--line); border-radius: 14px;
  color: var(--muted) }
.numbers li.head { border-color: transparent; padding-left: 2px } .numbers b { color: var(--text); font-weight: 600 }
.advisories { margin: 16px 0 } .advisory { background: var(--warn); border: 1px solid var(--warn-line); border-radius: 10px;
  padding: 11px 15px }
.advisory + .advisory, .advisory + details { margin-top: 9px } .advisory p { margin: 2px 0 0; font-size: 14px }
.advisory em { font-style: normal; font-weight: 600 }
details summary { cursor: pointer; color: var(--muted); font-size: 13.5px } details .scroll { margin-top: 8px }
.scroll { overflow-x: auto } .panel { padding: 8px 15px } main > .panel { margin-top: 18px }
table { border-collapse: collapse; font-size: 13.5px; min-width: 100% }
th, td { text-align: left; padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere }
th { font-weight: 500; color: var(--muted); white-space: nowrap } tr:last-child > * { border-bottom: 0 }
.compare td, .compare th { padding: 8px 18px 8px 0 }
.compare strong { display: block; font-size: 16px; font-weight: 600; white-space: nowrap }
.compare small { color: var(--muted); display: block; line-height: 1.3; min-width: 150px }
.compare tr:first-child th { color: var(--text) }
.lanes { margin: 0 0 12px; padding: 12px 14px } .lanes figcaption { font-weight: 600; font-size: 14.5px; margin-bottom: 8px }
.lanes .inner { min-width: 620px } .lane { display: flex; gap: 10px; align-items: stretch; margin-bottom: 5px }
.lane b { flex: 0 0 84px; font-weight: 500; font-size: 13px; color: var(--muted); text-align: right }
.track { position: relative; flex: 1; background: var(--grid); border-radius: 4px; min-height: var(--row) }
.track span { position: absolute; height: calc(var(--row) - 2px); min-width: 1.5px; border-radius: 3px; font-size: 11px;
  line-height: 18px;
  color: #fff; padding: 0 0 0 4px; overflow: hidden; white-space: nowrap;
  box-shadow: inset 0 0 0 0.5px rgba(255, 255, 255, 0.35) }
@media (prefers-color-scheme: dark) { .track span { color: #0e131a } }
.axis .track { background: none; min-height: 16px; border-top: 1px solid var(--line); border-radius: 0 }
.axis i { position: absolute; top: 1px; font-style: normal; font-size: 11.5px; color: var(--muted) } .axis i.end { right: 0 }
.samples { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)) }
.samples.pairs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)) }
.sample { padding: 12px 15px; min-width: 0 } .sample header { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 8px }
.sample pre { margin: 2px 0 9px; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 300px; overflow-y: auto;
  padding: 7px 10px;
  font: 13px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; background: var(--page);
  border-radius: 7px }
.sample footer { font-size: 13px; color: var(--muted) } .sample code { color: var(--text); overflow-wrap: anywhere }
.sample h4 i { font-weight: 400; font-style: normal; opacity: 0.75 }
.prompt { color: var(--muted) } .sample pre.given { color: var(--muted); background: none; border: 1px dashed var(--line) }
.chip { font-size: 12px; padding: 1px 9px; border-radius: 11px; background: var(--grid);
  color: var(--muted) }
.chip.good { color: var(--good); font-weight: 600 } .chip.bad { color: var(--bad); font-weight: 600 }
.t { border-radius: 3px; cursor: default } .t.special { color: var(--muted) } .t:hover { outline: 1.5px solid var(--accent) }
.legend { font-size: 13.5px; color: var(--muted); margin: 0 0 4px } .legend .scale { margin-left: 6px }
.legend button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 13px;
  padding: 1px 11px;
  margin: 2px 3px; cursor: pointer } .legend button[aria-pressed="true"] { color: var(--text); border-color: var(--accent);
  background: var(--card) }
.swatch { display: inline-block; padding: 0 7px; border-radius: 3px; margin: 0 2px; color: var(--text) }
.token-told { font-size: 13px; color: var(--muted); margin: 0 0 8px; min-height: 1.5em; overflow-wrap: anywhere }
.foot { color: var(--muted); font-size: 13px; margin: 40px 0 30px }
@media (max-width: 600px) {
  main, .top, nav div { padding-left: 14px; padding-right: 14px } .tiles { grid-template-columns: 1fr 1fr; gap: 9px }
  .tile { padding: 10px 12px } .tile strong { font-size: 17px } h1 { font-size: 22px } .chart .plot { height: 190px }
}
"""
