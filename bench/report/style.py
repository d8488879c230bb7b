"""The page's style sheet: light and dark, and for paper."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --faint: #d5d8dc; --soft: #f3f4f6 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e9; --paper: #16181b; --faint: #3c4046; --soft: #22252a } }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6rem } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--faint) } h3 { margin-top: 2rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; overflow-wrap: normal }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--faint); text-align: left;
  vertical-align: top; white-space: nowrap }
th { background: var(--soft) }
.wide { overflow-x: auto; margin: .8rem 0 }
.pair { display: flex; flex-wrap: wrap; gap: 0 3rem } .error { color: #c0392b; font-weight: 600 }
code { background: var(--soft); padding: .1rem .3rem; font-size: 13px }
figure { margin: 1.2rem 0 } figcaption { font-weight: 600 }
svg { display: block; width: 100%; max-width: 760px; font: 12px system-ui, sans-serif }
svg text { fill: var(--ink) } .faint { stroke: var(--faint) } .ink { stroke: var(--ink) }
@media print {
  :root { --ink: #000; --paper: #fff; --faint: #bbb; --soft: #eee } body { max-width: none; padding: 0; font-size: 11px }
  figure, tr { break-inside: avoid } h2, h3 { break-after: avoid } .wide { overflow: visible } table { font-size: 7px }
  th, td { white-space: normal; padding: .15rem .3rem }
}
"""
