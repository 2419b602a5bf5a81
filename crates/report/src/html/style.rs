//! Colours and layout of the page: light, dark by the reader's setting, on a phone, on paper.

/// The whole style sheet. Series have the colours of Okabe and Ito, which colour-blind readers can
/// distinguish.
pub(super) const STYLE: &str = "
:root{color-scheme:light dark;--page:#fff;--text:#1b1f24;--dim:#59636e;--rule:#d1d9e0;--soft:#f3f5f7;--a:#1764ab;--b:#b3471b;--learned:#d7f0dc;--right:#116329;--peak:#3b434b}
@media (prefers-color-scheme:dark){:root{--page:#14181d;--text:#e6e9ec;--dim:#9aa4ae;--rule:#343b43;--soft:#1d232a;--a:#6cb2f5;--b:#f59d6c;--learned:#1c4428;--right:#7ee295;--peak:#c3cbd3}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:0 auto;padding:1.5rem 1rem 4rem;background:var(--page);color:var(--text);overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.2rem;margin:2.5rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--rule)}h3{font-size:1rem;margin:1rem 0 .3rem}
.summary{font-size:1.05rem;margin:.2rem 0 1rem}.notice{border-left:4px solid var(--b);background:var(--soft);padding:.5rem .8rem}
dl{display:flex;flex-wrap:wrap;gap:.6rem;margin:.6rem 0}dt{color:var(--dim);font-size:.85rem}dd{margin:0}
.headline div{background:var(--soft);border-radius:8px;padding:.5rem .9rem;flex:1 1 auto}.headline dd{font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums}
.figures{gap:.4rem 2rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:1.2rem 2rem;align-items:start}
figure{margin:0;min-width:0}figcaption{font-weight:600;margin-bottom:.3rem}.key{font-weight:400;font-size:.9rem;margin-left:.7rem;white-space:nowrap}
.key i{display:inline-block;width:.9em;height:.9em;border-radius:2px;margin-right:.35em;vertical-align:-.08em;background:currentColor}
.key i.line,.key i.level{height:.2em;vertical-align:.25em}.key i.point,.key i.ring{border-radius:50%}.key i.ring{background:none;border:2px solid}
svg{display:block;width:100%;max-width:36rem;height:auto}svg.bars{max-width:none}text{fill:var(--dim);font-size:12px}.x{text-anchor:middle}.y{text-anchor:end}
polyline{fill:none;stroke:currentColor;stroke-width:1.6;vector-effect:non-scaling-stroke;stroke-linejoin:round}circle,rect,polygon{fill:currentColor}circle.ring{fill:none;stroke:currentColor;stroke-width:1.6;pointer-events:all}
polygon,rect{stroke:var(--page);stroke-width:.6}.grid{stroke:var(--rule);fill:none}
.a{color:var(--a)}.b{color:var(--b)}.plan{color:var(--dim)}polyline.plan{stroke-dasharray:6 4}.peak{color:var(--peak)}
.s0{color:#e69f00}.s1{color:#56b4e9}.s2{color:#0072b2}.s3{color:#d55e00}.s4{color:#009e73}.s5{color:#cc79a7}.s6{color:#8f99a3}.s7{color:#b8a90a}
.scroll{overflow-x:auto}.scroll:focus-visible{outline:2px solid var(--a)}
table{border-collapse:collapse;margin:.8rem 0;overflow-wrap:normal}caption{text-align:left;color:var(--dim);font-size:.9rem;padding-bottom:.3rem}
td,th{text-align:right;padding:.25rem .9rem .25rem 0;font-variant-numeric:tabular-nums;border-bottom:1px solid var(--rule)}th{font-weight:600}tbody th{font-weight:400}th:first-child{text-align:left}.charts td,.charts th{padding-right:.5rem}
.answers{width:100%;table-layout:fixed;overflow-wrap:anywhere}.answers td,.answers th{text-align:left;vertical-align:top}.answers tbody th{font-weight:600;padding-top:.8rem;border:0}.right{color:var(--right)}.right span{font-size:.85rem;white-space:nowrap}
.rows{padding-left:1.4rem}.rows div{color:var(--dim);font-size:.9rem}.row{margin:.2rem 0 1rem;padding:.6rem .8rem;background:var(--soft);border-radius:6px;white-space:pre-wrap}
mark{background:var(--learned);color:inherit;text-decoration:underline;text-decoration-thickness:2px;text-underline-offset:3px;border-radius:2px}em{color:var(--dim)}
pre{overflow-x:auto;padding:.8rem;background:var(--soft);border-radius:6px;font-size:.85rem;margin:.3rem 0}pre.wrap{white-space:pre-wrap}summary{cursor:pointer}
@media (max-width:30rem){body{font-size:15px}.headline div{flex:1 1 40%}.headline dd{font-size:1rem}td,th{padding-right:.6rem}}
@page{margin:14mm}
@media print{:root{color-scheme:light;--page:#fff;--text:#000;--dim:#444;--rule:#bbb;--soft:#f3f5f7;--a:#1764ab;--b:#b3471b;--learned:#d7f0dc;--right:#116329;--peak:#3b434b}
body{max-width:none;padding:0;font-size:11pt}*{print-color-adjust:exact}figure,tr,.row{break-inside:avoid}h2{break-after:avoid}.scroll,pre{overflow:visible}pre{white-space:pre-wrap}details::details-content{content-visibility:visible;block-size:auto}}
";
