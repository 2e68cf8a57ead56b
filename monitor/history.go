package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"agentctl/control"
	"agentctl/duration"
	"agentctl/prober"
	"agentctl/term"
)

// The history of a daemon is read with HistoryEach, one page at a time, so that a window of a
// year needs no more memory than one of an hour. Records arrive in ascending order of time,
// each with its new values only: at one record per second, most records lack a module that is
// read every 5 s.

// ErrNoHistory reports a daemon that records nothing.
var ErrNoHistory = errors.New("no history")

// ParseTime parses a time in a form that people type: how long before now (15m, 7d), RFC
// 3339, or a date, or date and time, in now's zone.
//
// A duration is tried first; no form of a date is also a duration. A time without a zone is in
// that of now, which is the person's.
func ParseTime(s string, now time.Time) (time.Time, error) {
	if d, err := duration.Parse(s); err == nil {
		return now.Add(-d), nil
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateOnly, "2006-01-02T15:04", time.DateTime} {
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("not a time: %q (use 15m, 24h or 7d for how long ago, or 2026-01-02T15:04:05Z)", s)
}

// Clock returns the daemon's time, which its records carry. It may differ from this process's
// time, since the daemon replaces a wrong system time by its relay's. While a board without a
// battery-backed clock does not know the time, isSet is false and now is this process's time.
func Clock(ctx context.Context, cl *control.Client) (now time.Time, isSet bool) {
	s, err := cl.Snapshot(ctx)
	if err != nil {
		return time.Now(), true // the query that follows reports it
	}
	if s.TS == 0 {
		return time.Now(), false
	}
	return time.UnixMilli(s.TS), true
}

// HistorySource is where records come from: a daemon of this machine, which is a
// *control.Client, or a board behind a relay, which is a SeriesSource.
type HistorySource interface {
	HistoryEach(ctx context.Context, q control.HistoryQuery, fn func(control.HistoryItem) error) error
}

// Window is a part of a daemon's history.
type Window struct {
	Source       HistorySource
	FromMS, ToMS int64    // milliseconds since 1970, both included
	StepMS       int64    // keep the last record of each step; 0: every record
	Modules      []string // none: cpu and memory in a chart, all in an export
	ClockUnset   bool     // the daemon does not know the time yet; see Clock
	Hint         string   // what to do when the window is empty; "": what helps on this machine
}

// Trim shortens the default window of a chart, most of which would be empty on a new board:
// if the history is younger than the window, the window begins with the first record. At
// least a minute remains.
func (h *Window) Trim(ctx context.Context) error {
	q := control.HistoryQuery{Modules: []string{"cpu"}, Limit: 1}
	return h.each(ctx, q, func(item control.HistoryItem) error {
		h.FromMS = max(h.FromMS, min(item.TS, h.ToMS-time.Minute.Milliseconds()))
		return nil
	})
}

// each calls fn with the records of the window that q selects; it sets the times of q. It
// returns the error of fn or of the daemon, and ErrNoHistory when the daemon keeps none.
func (h *Window) each(ctx context.Context, q control.HistoryQuery, fn func(control.HistoryItem) error) error {
	q.FromMS, q.ToMS = h.FromMS, h.ToMS
	err := h.Source.HistoryEach(ctx, q, func(item control.HistoryItem) error {
		if item.TS < h.FromMS || item.TS > h.ToMS {
			return nil // an empty window is answered with the newest record
		}
		return fn(item)
	})
	var answer *control.Error
	if errors.As(err, &answer) && answer.Code == control.CodeNotSupported {
		return fmt.Errorf("%w: %w", ErrNoHistory, err)
	}
	return err
}

// records calls fn with the records of the window's modules and step.
func (h *Window) records(ctx context.Context, fn func(control.HistoryItem) error) error {
	return h.each(ctx, control.HistoryQuery{Modules: h.Modules, StepMS: h.StepMS}, fn)
}

// Draw prints a chart for each series of the window, as wide as the terminal and of a height
// at which all fit, within bounds. Without StepMS it requests one record for each column of
// the plot, or two where a column is two dots wide.
//
// Draw sets Modules and StepMS where they are not set. The points of all series are in memory;
// the default step bounds their number by the width of the terminal.
func (h *Window) Draw(ctx context.Context, w io.Writer, zone *time.Location) error {
	width, height, _ := term.Size(w)
	ascii := term.ASCIIOnly()
	if len(h.Modules) == 0 {
		h.Modules = []string{"cpu", "memory"}
	}
	if h.StepMS == 0 {
		dots := int64(term.PlotWidth(width))
		if !ascii {
			dots *= 2 // of a braille character
		}
		h.StepMS = term.NiceStep(time.Duration((h.ToMS-h.FromMS)/dots) * time.Millisecond).Milliseconds()
		if _, ok := h.Source.(SeriesSource); ok {
			h.StepMS = max(h.StepMS, minSeriesStep)
		}
	}
	points := map[string][]term.Point{}
	highest := map[string]float64{}
	err := h.records(ctx, func(item control.HistoryItem) error {
		for key, v := range item.Values {
			points[key] = append(points[key], term.Point{TS: item.TS, Value: v})
			highest[key] = max(highest[key], v)
		}
		return nil
	})
	if err != nil {
		return err
	}
	series := drawnSeries(points)
	// Without points the daemon recorded nothing; without series, nothing that is drawn.
	if len(series) == 0 {
		return h.drawNothing(w, zone)
	}
	title := h.text(zone)
	if step := ", one point per " + term.Span(time.Duration(h.StepMS)*time.Millisecond); len(title)+len(step) <= width {
		title += step
	}
	fmt.Fprintln(w, term.Truncate(title, width))
	for _, s := range series {
		c := term.Chart{Label: s.Chart.Label, Unit: s.Unit, Points: points[s.Key], From: h.FromMS, To: h.ToMS, Step: h.StepMS, Max: s.Chart.Max,
			Width: max(width, term.MinChartWidth), Height: plotHeight(height, len(series)), ASCII: ascii, Zone: zone}
		// The scale ends at the total, such as that of the memory, and not at the highest use.
		if s.Chart.MaxKey != "" {
			c.Max = highest[s.Chart.MaxKey]
		}
		lines := c.Lines()
		lines[0] = term.Paint(term.ColorEnabled(w), term.Bold, lines[0])
		for _, line := range lines {
			if _, err := fmt.Fprintln(w, line); err != nil {
				return err
			}
		}
	}
	return nil
}

// drawNothing prints that the window is empty, and the next step. That is not a failure: the
// exit code of a chart without points is 0.
func (h *Window) drawNothing(w io.Writer, zone *time.Location) error {
	text := h.text(zone) + ": nothing was recorded.\n" +
		cmp.Or(h.Hint, "A longer window may have something: agentctl history --since 7d; whether anything is recorded: agentctl status") + "\n"
	if h.ClockUnset {
		text += "The clock is not set yet: what is recorded now gets its time, and a place here, when it is known.\n"
	}
	_, err := io.WriteString(w, text)
	return err
}

// drawnSeries returns the sensors that have points and are drawn, in the catalogue's order.
// Hidden ones are not: another series of the module stands for them. A value that is not in
// the catalogue is drawn by its key.
func drawnSeries(points map[string][]term.Point) []*prober.Sensor {
	var series []*prober.Sensor
	isKnown := map[string]bool{}
	sensors := prober.Sensors()
	for i := range sensors {
		s := &sensors[i]
		isKnown[s.Key] = s.Chart.Hidden || s.Chart.Label != ""
		if s.Chart.Label != "" && len(points[s.Key]) > 0 {
			series = append(series, s)
		}
	}
	others := []string{}
	for key := range points {
		if !isKnown[key] {
			others = append(others, key)
		}
	}
	slices.SortFunc(others, compareKeys)
	for _, key := range others {
		series = append(series, &prober.Sensor{Key: key, Chart: prober.Chart{Label: key}})
	}
	return series
}

// plotHeight returns how many lines each plot may have so that all charts fit the terminal:
// each has three more lines, and the window's title and the prompt take two. A plot has at
// least 4 lines, to be readable, and at most 12.
func plotHeight(lines, charts int) int {
	return min(max((lines-2)/charts-3, 4), 12)
}

// text returns the window for people. A day that both ends share is named once. The zone is
// named, since people often watch a board from another one.
func (h *Window) text(zone *time.Location) string {
	from, to := time.UnixMilli(h.FromMS).In(zone), time.UnixMilli(h.ToMS).In(zone)
	layout := time.DateTime
	if from.Format(time.DateOnly) == to.Format(time.DateOnly) {
		layout = time.TimeOnly
	}
	return from.Format(time.DateTime) + " to " + to.Format(layout+" MST")
}
