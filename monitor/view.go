package monitor

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"agentctl/control"
	"agentctl/prober"
	"agentctl/prober/alert"
	"agentctl/term"
)

// View is the live view on a terminal. It keeps the newest value and the past of each series,
// and redraws everything for each message and each second:
//
//	attic  01hzx9k3m4p7q8r9s0t1v2w3xy                     13:20:02    header
//	CPU      97.0 %                       ▁▄█                         a row for each series
//	Memory   128 MiB of 512 MiB, 25 %     ▂▂▂
//	Power    good                                                     below the rows; a warning: above the alerts
//
//	13:19:59 error disk is 96 % full                                  the newest alerts
//	update ready: agentctl v2 | q ends                                footer
//
// On a small terminal the rows give way to the alerts and the footer. A View belongs to one
// goroutine. It reads Messages only, so that a test needs no daemon.
type View struct {
	color, ascii bool
	zone         *time.Location

	connection Connection
	lostAt     time.Time // when the connection was lost
	backAt     time.Time // when it came back
	newestAt   time.Time // when the newest sample came
	newestTS   int64     // when it was taken, milliseconds since 1970
	samples    int
	lost       int64                // messages dropped because this view was too slow
	phase      string               // of the daemon's last state event; "stop": sampling was stopped
	updateText string               // the staged version
	values     map[string]float64   // the newest ones, by key
	past       map[string][]float64 // by key, the oldest first; NaN is a gap
	alerts     []shownAlert         // the newest last
}

// shownAlert is an alert as lines of the view: head is its time and level, and color an SGR
// parameter. Two equal ones are the same alert.
type shownAlert struct{ head, text, color string }

// Bounds of what the view keeps, and the sizes at which its layout changes.
const (
	maxPast         = 512 // values kept of each series
	maxAlerts       = 5
	staleAfter      = 3 * time.Second  // without a sample
	showBack        = 10 * time.Second // how long the footer shows that the daemon is back
	wideTerminal    = 60               // columns from which on rows are longer
	tallTerminal    = 16               // lines from which on an alert has three of them
	minSparkColumns = 4
)

// NewView makes a view for a terminal with or without color and Unicode.
func NewView(color, ascii bool) *View {
	return &View{color: color, ascii: ascii, zone: time.Local, values: map[string]float64{}, past: map[string][]float64{}}
}

// handle applies one message to the view. It ignores params that do not decode, which are from
// a newer daemon.
func (v *View) handle(m Message) {
	switch m.Event {
	case EventConnection:
		v.setConnection(m.Params)
	case control.EventMetrics, EventSnapshot:
		r, err := ParseReading(m.Params)
		if err != nil {
			return
		}
		v.newestAt, v.newestTS = time.Now(), r.TS
		if m.Event == control.EventMetrics {
			// A sample ends a stop. Snapshots do not count: the watcher polls them beside the samples.
			v.samples, v.phase = v.samples+1, ""
		}
		for key, x := range r.Values {
			v.values[key] = x
			v.record(key, x)
		}
	case control.EventState:
		var st control.State
		_ = json.Unmarshal(m.Params, &st)
		v.phase = st.Phase
	case EventLost: // no gap is drawn: the values are only rarer
		var l struct{ Count int64 }
		_ = json.Unmarshal(m.Params, &l)
		v.lost += l.Count
	case "alert":
		var a alert.Event
		if json.Unmarshal(m.Params, &a) == nil {
			v.addAlert(a)
		}
	case "update_ready":
		var u struct{ Component, Version string }
		_ = json.Unmarshal(m.Params, &u)
		v.updateText = term.SafeLine(u.Component + " " + u.Version)
	}
}

// setConnection applies the params of EventConnection. A lost connection is a gap in every
// series.
func (v *View) setConnection(params []byte) {
	before := v.connection.State
	v.connection.Alerts = nil // Unmarshal would keep them
	_ = json.Unmarshal(params, &v.connection)
	for _, a := range v.connection.Alerts {
		v.addAlert(a)
	}
	switch {
	case v.connection.State == "lost":
		v.lostAt = time.Now()
		for key := range v.past {
			v.record(key, math.NaN())
		}
	case before == "lost":
		v.backAt = time.Now()
	}
}

// record adds a value to the past of a series. The past grows to twice maxPast before it is
// cut, so that most values cost no copy.
//
// The cut makes a new slice, so that the old array can be freed.
func (v *View) record(key string, x float64) {
	past := append(v.past[key], x)
	if len(past) > 2*maxPast {
		past = append([]float64(nil), past[len(past)-maxPast:]...)
	}
	v.past[key] = past
}

// addAlert shows an alert once, although it may come twice: as an event, and as raised before
// the connection. Its text may come from another machine and is made safe for a terminal.
func (v *View) addAlert(a alert.Event) {
	level := string(a.Level)
	head := fmt.Sprintf("%s %-5s ", time.UnixMilli(a.TS).In(v.zone).Format(time.TimeOnly), term.SafeLine(level))
	shown := shownAlert{head: head, text: term.SafeLine(a.Message)}
	switch level {
	case "error":
		shown.color = term.Red
	case "warn":
		shown.color = term.Yellow
	}
	if slices.Contains(v.alerts, shown) {
		return
	}
	v.alerts = append(v.alerts, shown)
	v.alerts = v.alerts[max(len(v.alerts)-maxAlerts, 0):]
}

// lines draws the view for a terminal of this size: at most height lines. When they do not
// fit, rows are left out from the bottom up, then lines from the top down: alerts and the
// footer matter more than any row.
func (v *View) lines(width, height int, now time.Time) []string {
	body := []string{v.header(width), ""}
	sensors := prober.Sensors()
	for i := range sensors {
		if row := v.row(&sensors[i], width); row != "" {
			body = append(body, row)
		}
	}
	foot := []string{""}
	if power, isBad := PowerText(v.values); isBad {
		foot = append(foot, fmt.Sprintf("%-8s ", "Power")+term.Paint(v.color, term.Yellow, power))
	} else if power != "" {
		body = append(body, fmt.Sprintf("%-8s ", "Power")+power)
	}
	if len(v.values) == 0 {
		body = append(body, "waiting for the first sample")
	}
	foot = append(foot, v.alertLines(width, height)...)
	foot = append(foot, term.Paint(v.color, term.Faint, term.Truncate(v.footer(now, width), width)))
	if lines := max(height-len(foot), 1); len(body) > lines {
		body = body[:lines]
	}
	out := append(body, foot...)
	return out[max(len(out)-height, 0):]
}

// alertLines returns the newest alerts, in at most a third of the terminal.
func (v *View) alertLines(width, height int) []string {
	perAlert := 1
	if height >= tallTerminal {
		perAlert = 3
	}
	var lines []string
	for _, a := range v.alerts {
		head := a.head
		wrapped := term.Wrap(a.text, max(width-len(head), 1))
		for _, line := range wrapped[:min(len(wrapped), perAlert)] {
			lines = append(lines, term.Paint(v.color, a.color, term.Truncate(head+line, width)))
			head = strings.Repeat(" ", len(head))
		}
	}
	return lines[max(len(lines)-max(height/3, 1), 0):]
}

// header returns the name of the board, its node id where it fits, and the time of the
// newest sample, right-aligned.
func (v *View) header(width int) string {
	name := term.SafeLine(v.connection.Name)
	if name == "" {
		name, _ = os.Hostname() // the socket is this machine's
	}
	if id := v.connection.NodeID; id != "" && len(name)+len(id)+12 < width {
		name += "  " + id
	}
	at := ""
	if v.newestTS > 0 {
		at = time.UnixMilli(v.newestTS).In(v.zone).Format(time.TimeOnly)
	}
	columns := max(width-len(at)-1, 1)
	return term.Paint(v.color, term.Bold, fmt.Sprintf("%-*s", columns, term.Truncate(name, columns))) + " " + at
}

// row returns the line of one sensor: label, value, sparkline; "" when it is not drawn or
// has no value. A sensor with a total (used of total memory) is drawn on the total's scale,
// unless it stays below a quarter of it and would be a flat line there. Temperatures are
// drawn from 20 C to 100 C, so that those of a day and of another board compare.
func (v *View) row(s *prober.Sensor, width int) string {
	x, ok := v.values[s.Key]
	if !ok || s.Chart.Label == "" {
		return ""
	}
	label, text, high := s.Chart.Label, term.Value(x, s.Unit), s.Chart.Max
	if total := v.values[s.Chart.MaxKey]; s.Chart.MaxKey != "" && total > 0 {
		text, high = fmt.Sprintf("%s of %s", text, term.Value(total, s.Unit)), total
		if s.Unit == "MiB" && width >= wideTerminal {
			text += fmt.Sprintf(", %.0f %%", x/total*100)
		}
	}
	if s.Key == "load.load_1m" { // one row for the three of them
		label = "Load"
		text = fmt.Sprintf("%.2f %.2f %.2f", x, v.values["load.load_5m"], v.values["load.load_15m"])
	}
	valueWidth := 28
	if width < wideTerminal {
		valueWidth = 19
	}
	line := fmt.Sprintf("%-8s %-*s", label, valueWidth, text)
	columns := width - len(line) - 1
	if columns < minSparkColumns {
		return line
	}
	past := v.past[s.Key]
	past = past[max(len(past)-columns, 0):]
	highest := 0.0
	for _, p := range past {
		if p > highest { // false for NaN
			highest = p
		}
	}
	low := 0.0
	switch {
	case s.Unit == "C":
		low, high = 20, 100
	case high == 0, s.Chart.MaxKey != "" && highest*4 < high: // no scale, or one that flattens the line
		high = term.NiceCeil(highest)
	}
	return line + " " + term.Paint(v.color, sparkColor(s, x), term.Sparkline(past, columns, low, high, v.ascii))
}

// sparkColor returns the warning color from 85 % or 75 C, and the error color from 95 % or
// 85 C. Many boards slow their CPU down between 80 and 85 C.
//
// Only values in percent or degrees have thresholds: for others there is no limit that holds
// on every machine.
func sparkColor(s *prober.Sensor, x float64) string {
	switch {
	case s.Unit == "%" && x >= 95, s.Unit == "C" && x >= 85:
		return term.Red
	case s.Unit == "%" && x >= 85, s.Unit == "C" && x >= 75:
		return term.Yellow
	}
	return term.Cyan
}

// footer returns what is unusual, most important first: a lost daemon, stopped sampling,
// missing samples. On a narrow terminal it replaces the hint how to quit.
//
// The first four exclude each other: a lost daemon explains missing samples.
func (v *View) footer(now time.Time, width int) string {
	var parts []string
	switch {
	case v.connection.State == "lost":
		parts = append(parts, fmt.Sprintf("daemon gone for %d s; waiting for it", int(now.Sub(v.lostAt).Seconds())))
	case v.phase == "stop":
		parts = append(parts, "sampling was stopped; go on with: agentctl start")
	case !v.newestAt.IsZero() && now.Sub(v.newestAt) > staleAfter:
		parts = append(parts, fmt.Sprintf("no sample for %d s", int(now.Sub(v.newestAt).Seconds())))
	case now.Sub(v.backAt) < showBack:
		parts = append(parts, "daemon came back")
	}
	if v.updateText != "" {
		parts = append(parts, "update ready: "+v.updateText)
	}
	if v.lost > 0 {
		parts = append(parts, fmt.Sprintf("%d events lost", v.lost))
	}
	if len(parts) == 0 || width >= wideTerminal {
		parts = append(parts, "q ends")
	}
	return strings.Join(parts, " | ")
}
