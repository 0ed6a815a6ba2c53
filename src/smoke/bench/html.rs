//! The report as one HTML file that needs no other: plots of latency over tokens, the figures, the machine, the command.

use std::fmt::Write as _;

use plotters::prelude::*;

use super::plan::{Mode, Scenario};
use super::report::Report;
use super::rows::{Of, Row};
use super::stats::Difference;
use crate::smoke::report::escape;

const SIZE: (u32, u32) = (860, 480);
/// Colours that are told apart by those who do not see all; markers tell the same.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 0, 0),
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(110, 110, 110),
];

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}\
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0;font-variant-numeric:tabular-nums}\
th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd}th:first-child,td:first-child,.text{text-align:left}\
pre{background:#f4f4f4;padding:.6rem;overflow-x:auto}svg{max-width:100%;height:auto}.fault{color:#a00;font-weight:bold}dt{font-weight:bold}";

/// The whole file. The error says which plot could not be drawn.
pub fn html(report: &Report) -> Result<String, String> {
    let mut text = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    let _ = writeln!(
        text,
        "<title>fi-arch bench: {}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        escape(&report.machine.line())
    );
    let _ = writeln!(text, "<h1>Fused all-reduce against NCCL + norm: {}</h1>", report.word().word());
    decisions(&mut text, report);
    for (scenario, rows) in report.by_scenario() {
        let mut ranks: Vec<usize> = rows.iter().map(|row| row.ranks).collect();
        ranks.dedup();
        for ranks in ranks {
            let rows: Vec<&Row> = rows.iter().copied().filter(|row| row.ranks == ranks).collect();
            let what = rows.first().map_or_else(String::new, |row| format!("hidden {} {}", row.hidden, row.dtype.word()));
            let title = match scenario {
                Scenario::Sweep => format!("{ranks} ranks: one call, {what}"),
                Scenario::Step => format!("{ranks} ranks: a decoding step in one graph, {what}"),
            };
            let _ = writeln!(text, "<h2>{}</h2>", escape(&title));
            if scenario == Scenario::Sweep {
                text.push_str(&plot(&rows).map_err(|error| format!("{title}: {error}"))?);
            }
            table(&mut text, scenario, &rows);
        }
    }
    about(&mut text, report);
    text.push_str("</body>\n</html>\n");
    Ok(text)
}

fn decisions(text: &mut String, report: &Report) {
    text.push_str("<ul>\n");
    for decision in &report.decisions {
        let _ = match (decision.fused, decision.max_tokens) {
            (true, Some(most)) => {
                let oneshot = decision.oneshot_tokens.map_or_else(String::new, |tokens| format!(", one-shot up to {tokens}"));
                writeln!(
                    text,
                    "<li>{} ranks: use it up to {most} tokens{oneshot}. {}</li>",
                    decision.ranks,
                    escape(&decision.reason)
                )
            }
            _ => writeln!(text, "<li>{} ranks: do not use it. {}</li>", decision.ranks, escape(&decision.reason)),
        };
    }
    let faults = report.rows.iter().filter_map(|row| row.fault.as_ref().map(|fault| format!("{}: {fault}", row.name())));
    for fault in report.platform.faults.iter().cloned().chain(faults) {
        let _ = writeln!(text, "<li class=\"fault\">{}</li>", escape(&fault));
    }
    for one in report.baseline.iter().flat_map(|compared| &compared.regressions) {
        let _ = writeln!(text, "<li class=\"fault\">{}</li>", escape(&one.text()));
    }
    text.push_str("</ul>\n");
}

/// What a line is called.
fn label(of: Of, mode: Mode) -> String {
    match (of, mode) {
        (Of::Nccl, Mode::NcclApart) => "NCCL apart + add + norm".to_owned(),
        (Of::Nccl, _) => "NCCL + norm".to_owned(),
        (Of::Artifact, mode) => format!("fused, {}", mode.word()),
        (Of::Against, mode) => format!("second artifact, {}", mode.word()),
    }
}

const LINES: [(Of, Mode); 6] = [
    (Of::Nccl, Mode::Nccl),
    (Of::Artifact, Mode::OneShot),
    (Of::Artifact, Mode::TwoShot),
    (Of::Against, Mode::OneShot),
    (Of::Against, Mode::TwoShot),
    (Of::Nccl, Mode::NcclApart),
];

/// Microseconds of a call over tokens, both logarithmic, as SVG.
fn plot(rows: &[&Row]) -> Result<String, String> {
    let points = |of: Of, mode: Mode| -> Vec<(f64, f64)> {
        let of_line = rows.iter().filter(|row| (row.of, row.mode) == (of, mode));
        of_line.filter_map(|row| Some((row.tokens as f64, row.series?.median_us))).collect()
    };
    let all: Vec<(f64, f64)> = LINES.iter().flat_map(|(of, mode)| points(*of, *mode)).collect();
    let range = |of: fn(&(f64, f64)) -> f64| {
        let (least, most) = all.iter().map(of).fold((f64::INFINITY, 0.0f64), |(least, most), x| (least.min(x), most.max(x)));
        least * 0.8..most * 1.25
    };
    if all.is_empty() {
        return Ok("<p>Nothing was measured.</p>\n".to_owned());
    }
    let mut svg = String::new();
    draw(&mut svg, range(|point| point.0), range(|point| point.1), points).map_err(|error| error.to_string())?;
    Ok(svg + "\n")
}

fn draw(
    svg: &mut String,
    tokens: std::ops::Range<f64>,
    micros: std::ops::Range<f64>,
    points: impl Fn(Of, Mode) -> Vec<(f64, f64)>,
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(58)
        .build_cartesian_2d(tokens.log_scale().base(2.0), micros.log_scale())?;
    let number = |value: &f64| if *value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    chart
        .configure_mesh()
        .x_desc("tokens")
        .y_desc("µs a call (median)")
        .x_label_formatter(&|value| format!("{value:.0}"))
        .y_label_formatter(&number)
        .max_light_lines(0)
        .draw()?;
    for (at, (of, mode)) in LINES.into_iter().enumerate() {
        let line = points(of, mode);
        if line.is_empty() {
            continue;
        }
        let style = COLOURS[at].stroke_width(2);
        chart.draw_series(LineSeries::new(line.iter().copied(), style))?;
        let filled = COLOURS[at].filled();
        let marks = line.into_iter();
        // A marker for each, so that lines are told apart without colour.
        let series = match at {
            0 => chart.draw_series(marks.map(|point| Cross::new(point, 4, style).into_dyn()))?,
            1 => chart.draw_series(marks.map(|point| Circle::new(point, 4, filled).into_dyn()))?,
            2 => chart.draw_series(marks.map(|point| TriangleMarker::new(point, 5, filled).into_dyn()))?,
            3 => chart.draw_series(marks.map(|point| Circle::new(point, 5, style).into_dyn()))?,
            4 => chart.draw_series(marks.map(|point| TriangleMarker::new(point, 7, style).into_dyn()))?,
            // An element of two parts names the backend, and is no `dyn` one.
            _ => chart.draw_series(marks.map(|point| EmptyElement::at(point) + Rectangle::new([(-4, -4), (4, 4)], style)))?,
        };
        series.label(label(of, mode)).legend(move |(x, y)| match at {
            0 => Cross::new((x + 10, y), 4, style).into_dyn(),
            1 => Circle::new((x + 10, y), 4, filled).into_dyn(),
            2 => TriangleMarker::new((x + 10, y), 5, filled).into_dyn(),
            3 => Circle::new((x + 10, y), 5, style).into_dyn(),
            4 => TriangleMarker::new((x + 10, y), 7, style).into_dyn(),
            _ => Rectangle::new([(x + 6, y - 4), (x + 14, y + 4)], style).into_dyn(),
        });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}

fn table(text: &mut String, scenario: Scenario, rows: &[&Row]) {
    let step = scenario == Scenario::Step;
    text.push_str("<table>\n<tr><th>way</th><th>tokens</th>");
    if step {
        text.push_str("<th>calls</th><th>µs a step</th>");
    }
    text.push_str("<th>median µs</th><th>p99</th><th>least</th><th>noise</th><th>replays</th><th>of NCCL + norm</th><th>of NCCL apart</th><th class=\"text\"></th></tr>\n");
    for row in rows {
        let taken = row.taken.map_or_else(String::new, |taken| format!(" ({})", taken.word()));
        let _ = write!(text, "<tr><td>{}{taken}</td><td>{}</td>", label(row.of, row.mode), row.tokens);
        if step {
            let micros = row.step_us.map_or_else(String::new, |micros| format!("{micros:.0}"));
            let _ = write!(text, "<td>{}</td><td>{micros}</td>", row.calls);
        }
        match row.series {
            Some(series) => {
                let times = |ratio: Option<f64>| ratio.map_or_else(String::new, |ratio| format!("{ratio:.2} ×"));
                let _ = write!(
                    text,
                    "<td>{:.2}</td><td>{:.2}</td><td>{:.2}</td><td>{:.2}</td><td>{}</td><td>{}</td><td>{}</td>",
                    series.median_us,
                    series.p99_us,
                    series.min_us,
                    series.noise_us,
                    series.replays,
                    times(row.ratio),
                    times(row.ratio_apart)
                );
            }
            None => text.push_str(&"<td></td>".repeat(7)),
        }
        let note = match (&row.fault, &row.skipped, row.difference) {
            (Some(fault), ..) => format!("<span class=\"fault\">{}</span>", escape(fault)),
            (_, Some(skipped), _) => escape(skipped),
            (.., Some(Difference::None)) => "no difference beyond the noise".to_owned(),
            _ => String::new(),
        };
        let _ = writeln!(text, "<td class=\"text\">{note}</td></tr>");
    }
    text.push_str("</table>\n");
}

fn about(text: &mut String, report: &Report) {
    text.push_str("<h2>Machine and method</h2>\n<dl>\n");
    let mut item = |name: &str, what: &str| _ = writeln!(text, "<dt>{name}</dt><dd>{}</dd>", escape(what));
    let machine = &report.machine;
    item("GPUs", &machine.line());
    item("Link", machine.topology.text());
    let nccl = machine.nccl.as_deref().unwrap_or("none");
    item("Software", &format!("CUDA {}, NCCL {nccl} with NCCL_NVLS_ENABLE={}", machine.cuda, machine.nvls));
    for (name, artifact) in [("Artifact", Some(&report.artifact)), ("Second artifact", report.against.as_ref())] {
        if let Some(one) = artifact {
            let release = one.flashinfer.as_deref().unwrap_or("of an unknown release");
            item(name, &format!("{} for {}, FlashInfer {release}", one.digest, one.target.join(", ")));
        }
    }
    let settings = &report.settings;
    item(
        "Method",
        &format!(
            "A graph is one call, an event, the timed calls, an event; of each of {} replays ({} before them to warm up) the slowest \
             rank counts. Legs in order: {}. Workers were to be started {} times: a figure is the median of its starts, and the noise \
             is how far legs and starts lie apart. Calls use {} sets of inputs and outputs in turn, which the L2 cache holds where they \
             are small. Outputs of every graph were held against a float64 reference before and after. NCCL + norm is NCCL in line with \
             one kernel that adds and norms, and decides; NCCL apart has a stream of its own, and two kernels behind it.",
            settings.replays, settings.warm_up, settings.order, settings.restarts, settings.sets
        ),
    );
    for remark in &report.remarks {
        item("Remark", remark);
    }
    text.push_str("</dl>\n");
    let _ = writeln!(text, "<pre>{}</pre>", escape(&report.command));
    let _ =
        writeln!(text, "<h2>Policy</h2>\n<pre>{}</pre>", report.policy_text().lines().map(escape).collect::<Vec<_>>().join("\n"));
}

#[cfg(test)]
mod tests {
    use super::super::plan::Point;
    use super::super::report::tests::{good, report};
    use super::super::rows::tests::{measured, point};
    use super::*;

    #[test]
    fn the_file_needs_no_other_and_holds_plot_figures_machine_and_command() {
        let mut rows = good().rows;
        rows.extend(measured(&Point { scenario: Scenario::Step, ..point(2, 3) }, 16.0, Some(5.3), None));
        let mut report = report(rows);
        report.command = "fi-arch bench <it> & more".to_owned();
        let html = html(&report).unwrap();
        // The name of the SVG namespace is no address that anything fetches.
        let rest = html.replace("http://www.w3.org/2000/svg", "");
        for reference in ["http", "src=", "href", "url(", "@import", "<script", "<link", "<img"] {
            assert!(!rest.contains(reference), "{reference}");
        }
        assert_eq!((html.matches("<svg").count(), html.matches("<table").count()), (1, 2));
        for held in
            ["5.30", "0.33 ×", "NVIDIA H200", "580.159.04", "fi-arch bench &lt;it&gt; &amp; more", "max_tokens = 64", "530"]
        {
            assert!(html.contains(held), "{held}");
        }
        assert!(html.contains("NCCL + norm") && html.contains("fused, one-shot"), "the legend");
        let apart = format!("{:.2} ×", 5.3 / 18.0);
        assert!(html.matches("NCCL apart + add + norm").count() > 1 && html.contains(&apart), "a line and rows");
    }

    #[test]
    fn faults_and_what_was_left_out_are_told() {
        let mut wrong = good();
        wrong.rows[1].fault = Some("token 1 < 2".to_owned());
        let html = html(&wrong).unwrap();
        assert!(html.contains("token 1 &lt; 2") && html.contains("left out"), "{html}");
    }

    #[test]
    fn a_run_without_any_figure_is_still_a_file() {
        assert!(html(&report(Vec::new())).unwrap().contains("</html>"));
    }
}
