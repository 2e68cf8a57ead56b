package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"agentctl/client"
	"agentctl/control"
	"agentctl/prober/alert"
	"agentctl/term"
)

// view is the live view of watch.
type view struct {
	colour, ascii bool
	zone          *time.Location

	state   watchState
	backAt  time.Time // connected again after a loss
	lostAt  time.Time
	newest  time.Time // when the newest sample came
	ts      int64     // and when it was taken
	samples int
	lost    int64
	phase   string // of the last event state: stop is worth a word
	update  string
	now     map[string]float64
	past    map[string][]float64 // by key, oldest first
	alerts  []viewAlert          // newest last
}

// viewAlert is an alert as it is shown.
type viewAlert struct{ head, text, sgr string }

const (
	viewPast   = 512 // values kept of each series
	viewAlerts = 5
)

func newView(colour, ascii bool) *view {
	return &view{colour: colour, ascii: ascii, zone: time.Local, now: map[string]float64{}, past: map[string][]float64{}}
}

// run shows the view on f until ctx ends, q is typed, or count samples came.
func (v *view) run(ctx context.Context, f *os.File, msgs <-chan watchMsg, count int) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	s := term.NewScreen(f)
	resized, paused := notify(syscall.SIGWINCH), notify(syscall.SIGTSTP)
	defer signal.Stop(resized)
	defer signal.Stop(paused)
	var wg sync.WaitGroup
	s.Enter()
	defer func() { // also when drawing panics
		cancel()
		wg.Wait()
		s.Leave()
		fmt.Fprintln(f, v.summary())
	}()
	wg.Go(func() { term.WatchKeys(ctx, cancel) })

	clock := time.NewTicker(time.Second)
	defer clock.Stop()
	for {
		width, height, _ := term.Size(f)
		if err := s.Draw(v.lines(width, height, time.Now())); err != nil {
			return exit(exitFailure, "write to the terminal: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case m := <-msgs:
			v.take(m)
			if count > 0 && v.samples >= count {
				return client.ErrStop
			}
		case <-resized:
		case <-paused:
			s.Suspend()
		case <-clock.C:
		}
	}
}

// take changes the view by an event.
func (v *view) take(m watchMsg) {
	switch m.event {
	case watchConnection:
		was := v.state.State
		v.state.Alerts = nil
		_ = json.Unmarshal(m.params, &v.state)
		for _, a := range v.state.Alerts {
			v.alert(a)
		}
		if v.state.State == "lost" {
			v.lostAt = time.Now()
			v.gap()
		} else {
			if was == "lost" {
				v.backAt = time.Now()
			}
		}
	case control.EventMetrics, watchSnapshot:
		r, err := parseReading(m.params)
		if err != nil {
			return
		}
		v.newest, v.ts = time.Now(), r.TS
		if m.event == control.EventMetrics {
			v.samples, v.phase = v.samples+1, ""
		}
		for k, x := range r.Values {
			v.now[k] = x
			v.keep(k, x)
		}
	case control.EventState:
		var st control.State
		_ = json.Unmarshal(m.params, &st)
		v.phase = st.Phase
	case watchLost:
		var l struct{ Count int64 }
		_ = json.Unmarshal(m.params, &l)
		v.lost += l.Count
	case "alert":
		var a alert.Event
		if json.Unmarshal(m.params, &a) == nil {
			v.alert(a)
		}
	case "update_ready":
		var u struct{ Component, Version string }
		_ = json.Unmarshal(m.params, &u)
		v.update = term.SafeLine(u.Component + " " + u.Version)
	}
}

func (v *view) keep(key string, x float64) {
	past := append(v.past[key], x)
	if len(past) > 2*viewPast {
		past = append([]float64(nil), past[len(past)-viewPast:]...)
	}
	v.past[key] = past
}

// gap marks a time without samples in every line.
func (v *view) gap() {
	for k := range v.past {
		v.keep(k, math.NaN())
	}
}

// alert shows an alert. It may be told twice: as an event, and as raised before.
func (v *view) alert(a alert.Event) {
	level := string(a.Level)
	sgr := map[string]string{"error": term.Red, "warn": term.Yellow}[level]
	head := fmt.Sprintf("%s %-5s ", time.UnixMilli(a.TS).In(v.zone).Format(time.TimeOnly), term.SafeLine(level))
	shown := viewAlert{head, term.SafeLine(a.Message), sgr}
	if slices.Contains(v.alerts, shown) {
		return
	}
	v.alerts = append(v.alerts, shown)
	if len(v.alerts) > viewAlerts {
		v.alerts = v.alerts[1:]
	}
}

// lines draws the view for a terminal of this size.
func (v *view) lines(width, height int, now time.Time) []string {
	out := []string{v.header(width), ""}
	for _, s := range catalogue {
		if line := v.row(s, width); line != "" {
			out = append(out, line)
		}
	}
	power, bad := powerText(v.now)
	if power != "" {
		power = fmt.Sprintf("%-8s ", "Power") + term.Paint(v.colour && bad, term.Yellow, power)
		if !bad {
			out = append(out, power)
		}
	}
	if len(v.now) == 0 {
		out = append(out, "waiting for the first sample")
	}
	foot := []string{""}
	if bad {
		foot = append(foot, power)
	}
	var told []string
	room := 1 // lines of an alert
	if height >= 16 {
		room = 3
	}
	for _, a := range v.alerts {
		for i, line := range term.Wrap(a.text, max(width-len(a.head), 1)) {
			head := a.head
			if i == room {
				break
			}
			if i > 0 {
				head = strings.Repeat(" ", len(head))
			}
			told = append(told, term.Paint(v.colour && a.sgr != "", a.sgr, term.Truncate(head+line, width)))
		}
	}
	foot = append(foot, told[max(len(told)-max(height/3, 1), 0):]...)
	foot = append(foot, term.Paint(v.colour, term.Faint, term.Truncate(v.foot(now, width), width)))
	if room := height - len(foot); len(out) > room { // the end matters more than the last rows
		out = out[:max(room, 1)]
	}
	out = append(out, foot...)
	return out[max(len(out)-height, 0):]
}

func (v *view) header(width int) string {
	name := term.SafeLine(v.state.Name)
	if name == "" {
		name, _ = os.Hostname() // the socket is this machine's
	}
	if id := v.state.NodeID; id != "" && len(name)+len(id)+12 < width {
		name += "  " + id
	}
	at := ""
	if v.ts > 0 {
		at = time.UnixMilli(v.ts).In(v.zone).Format(time.TimeOnly)
	}
	room := max(width-len(at)-1, 1)
	return term.Paint(v.colour, term.Bold, fmt.Sprintf("%-*s", room, term.Truncate(name, room))) + " " + at
}

// row is a line of one series: label, value, sparkline.
func (v *view) row(s series, width int) string {
	x, ok := v.now[s.key]
	if !ok {
		return ""
	}
	text := term.Value(x, s.unit)
	hi := s.max
	if t := v.now[s.maxKey]; s.maxKey != "" && t > 0 {
		text, hi = fmt.Sprintf("%s of %s", text, term.Value(t, s.unit)), t
		if s.unit == "MiB" && width >= 60 {
			text += fmt.Sprintf(", %.0f %%", x/t*100)
		}
	}
	if s.key == "load.load_1m" {
		s.label = "Load"
		text = fmt.Sprintf("%.2f %.2f %.2f", x, v.now["load.load_5m"], v.now["load.load_15m"])
	}
	valueWidth := 28
	if width < 60 {
		valueWidth = 19
	}
	line := fmt.Sprintf("%-8s %-*s", s.label, valueWidth, text)
	room := width - len(line) - 1
	if room < 4 {
		return line
	}
	past := v.past[s.key]
	past = past[max(len(past)-room, 0):]
	most := 0.0
	for _, p := range past {
		if p > most { // false for NaN
			most = p
		}
	}
	lo := 0.0
	switch {
	case s.unit == "C":
		lo, hi = 20, 100
	case hi == 0, s.maxKey != "" && most*4 < hi: // no scale of its own, or a flat line on it
		hi = term.NiceCeil(most)
	}
	return line + " " + term.Paint(v.colour, barColour(s, x), term.Sparkline(past, room, lo, hi, v.ascii))
}

// barColour warns of what runs full or hot.
func barColour(s series, x float64) string {
	switch {
	case s.unit == "%" && x >= 95, s.unit == "C" && x >= 85:
		return term.Red
	case s.unit == "%" && x >= 85, s.unit == "C" && x >= 75:
		return term.Yellow
	}
	return term.Cyan
}

func (v *view) foot(now time.Time, width int) string {
	var parts []string
	switch {
	case v.state.State == "lost":
		parts = append(parts, fmt.Sprintf("daemon gone for %d s; waiting for it", int(now.Sub(v.lostAt).Seconds())))
	case v.phase == "stop":
		parts = append(parts, "sampling was stopped; go on with: agentctl start")
	case !v.newest.IsZero() && now.Sub(v.newest) > 3*time.Second:
		parts = append(parts, fmt.Sprintf("no sample for %d s", int(now.Sub(v.newest).Seconds())))
	case now.Sub(v.backAt) < 10*time.Second:
		parts = append(parts, "daemon came back")
	}
	if v.update != "" {
		parts = append(parts, "update ready: "+v.update)
	}
	if v.lost > 0 {
		parts = append(parts, fmt.Sprintf("%d events lost", v.lost))
	}
	if len(parts) == 0 || width >= 60 {
		parts = append(parts, "q ends")
	}
	return strings.Join(parts, " | ")
}

// summary is what stays on the terminal.
func (v *view) summary() string {
	return fmt.Sprintf("watched %d samples; see more with: agentctl history", v.samples)
}

// notify is signal.Notify with a channel that keeps one signal.
func notify(sig ...os.Signal) chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, sig...)
	return c
}
