package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/control"
	"agentctl/duration"
	"agentctl/prober"
	"agentctl/term"
)

func newHistory() *cobra.Command {
	var h historyQuery
	var socket, since, until, step, format string
	c := &cobra.Command{
		Use:   "history",
		Short: "What was recorded on this box: a chart, or an export",
		Long: `What was recorded on this box: a chart for people, or with -o the records themselves.

A time is how long ago it was (90s, 15m, 24h, 7d, 2w), or RFC 3339 (2026-01-02T15:04:05Z), or
a day (2026-01-02, local time). --step keeps the last record of each so much time; without it a
chart takes what fits its width, and an export takes every record. Without --since a chart of a
daemon that began less than an hour ago begins with its first record. In an export ts is in
milliseconds since 1970.`,
		Example: `  agentctl history
  agentctl history --since 24h --modules cpu,temperature
  agentctl history --since 7d --step 10m -o csv > week.csv
  agentctl history --since 2026-01-02T00:00:00Z --until 2026-01-03T00:00:00Z -o ndjson`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if h.modules, err = checkModules(h.modules); err != nil {
				return err
			}
			if step != "" {
				d, err := duration.Parse(step)
				if err != nil || d < time.Millisecond {
					return exit(exitUsage, "--step: %w", &duration.Error{Text: step})
				}
				h.step = d.Milliseconds()
			}
			cl, err := dialSocket(cmd.Context(), socket)
			if err != nil {
				return err
			}
			defer func() { _ = cl.Close() }()
			if err := h.window(cmd.Context(), cl, since, until); err != nil {
				return err
			}
			h.cl = cl
			if format != "" {
				if len(h.modules) == 0 {
					h.modules, h.all = moduleNames, true
				}
				return h.export(cmd.Context(), cmd.OutOrStdout(), format)
			}
			if !cmd.Flags().Changed("since") {
				if err := h.trim(cmd.Context()); err != nil {
					return err
				}
			}
			return h.draw(cmd.Context(), cmd.OutOrStdout(), time.Local)
		},
	}
	f := c.Flags()
	f.VarP(&formatFlag{&format, []string{"csv", "json", "ndjson", "yaml"}}, "output", "o", "print `FORMAT` instead of a chart: csv, json, ndjson or yaml")
	addJSONFlag(c, &format)
	f.StringVar(&socket, "socket", env("AGENTCTL_SOCKET", config.ClientSocket()), "`PATH` of the control socket [AGENTCTL_SOCKET]")
	f.StringVar(&since, "since", "1h", "begin so long ago, or at this `TIME`")
	f.StringVar(&until, "until", "0s", "end so long ago, or at this `TIME`")
	f.StringVar(&step, "step", "", "keep one record each `DURATION`")
	f.StringSliceVar(&h.modules, "modules", nil, "only these `MODULES`: "+strings.Join(moduleNames, ", ")+" (chart: cpu and memory, export: all)")
	return c
}

// parseMoment is a time that a person gave: how long before now, or a date.
func parseMoment(s string, now time.Time) (time.Time, error) {
	if d, err := duration.Parse(s); err == nil {
		return now.Add(-d), nil
	}
	if t, err := time.Parse(time.RFC3339Nano, s); err == nil {
		return t, nil
	}
	for _, layout := range []string{time.DateOnly, "2006-01-02T15:04", time.DateTime} {
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("%q is no time: say how long ago (15m, 24h, 7d) or RFC 3339 (2026-01-02T15:04:05Z)", s)
}

// historyQuery asks the daemon for a window of time.
type historyQuery struct {
	cl       *control.Client
	from, to int64 // milliseconds since 1970, both included
	step     int64 // milliseconds; 0: every record
	limit    int   // at most so many items; 0: all
	modules  []string
	all      bool // modules are not of the user's choice
	timeless bool // the daemon does not know the time yet
}

// window finds the times asked for, by the daemon's clock: this board's may be off.
func (h *historyQuery) window(ctx context.Context, cl *control.Client, since, until string) error {
	now := time.Now()
	if s, err := cl.Snapshot(ctx); err == nil && s.TS > 0 {
		now = time.UnixMilli(s.TS)
	} else if err == nil {
		h.timeless = true
	}
	from, err := parseMoment(since, now)
	if err != nil {
		return exit(exitUsage, "--since: %w", err)
	}
	to, err := parseMoment(until, now)
	if err != nil {
		return exit(exitUsage, "--until: %w", err)
	}
	if !from.Before(to) {
		return exit(exitUsage, "--since %s is not before --until %s", since, until)
	}
	h.from, h.to = max(from.UnixMilli(), 0), to.UnixMilli()
	if h.to < h.from {
		return exit(exitUsage, "--until %s is before 1970", until)
	}
	return nil
}

// trim lets the window begin with the first record, for a history that is younger.
func (h *historyQuery) trim(ctx context.Context) error {
	one := *h
	one.limit = 1
	return one.each(ctx, []string{"cpu"}, 0, func(item control.HistoryItem) error {
		h.from = max(h.from, min(item.TS, h.to-time.Minute.Milliseconds()))
		return nil
	})
}

// each calls fn with the items of the window, in ascending order.
func (h *historyQuery) each(ctx context.Context, modules []string, step int64, fn func(control.HistoryItem) error) error {
	q := control.HistoryQuery{FromMS: h.from, ToMS: h.to, Modules: modules, StepMS: step, Limit: h.limit}
	own := false // fn's error, not the daemon's
	err := h.cl.HistoryEach(ctx, q, func(item control.HistoryItem) error {
		if item.TS < h.from || item.TS > h.to {
			return nil // an empty window is answered with what is newest
		}
		if err := fn(item); err != nil {
			own = true
			return err
		}
		return nil
	})
	var ce *control.Error
	switch {
	case err == nil:
		return nil
	case own:
		return exit(exitFailure, "%w", err)
	case errors.As(err, &ce) && ce.Code == control.CodeNotSupported:
		return exit(exitFailure, "%w; see whether it records with: agentctl status", err)
	}
	return socketError(err)
}

// draw prints charts as wide as the terminal.
func (h *historyQuery) draw(ctx context.Context, w io.Writer, zone *time.Location) error {
	width, height, _ := term.Size(w)
	ascii := term.ASCIIOnly()
	if len(h.modules) == 0 {
		h.modules = []string{"cpu", "memory"}
	}
	if h.step == 0 {
		dots := int64(term.PlotWidth(width))
		if !ascii {
			dots *= 2
		}
		h.step = term.NiceStep(time.Duration((h.to-h.from)/dots) * time.Millisecond).Milliseconds()
	}
	points := map[string][]term.Point{}
	most := map[string]float64{}
	err := h.each(ctx, h.modules, h.step, func(item control.HistoryItem) error {
		for k, x := range item.Values {
			points[k] = append(points[k], term.Point{TS: item.TS, Value: x})
			most[k] = max(most[k], x)
		}
		return nil
	})
	if err != nil {
		return err
	}
	shown := h.shown(points)
	if len(points) == 0 || len(shown) == 0 {
		fmt.Fprintf(w, "%s: nothing was recorded.\nA longer window may have something: agentctl history --since 7d; whether anything is recorded: agentctl status\n",
			windowText(h.from, h.to, zone))
		if h.timeless {
			fmt.Fprintln(w, "The clock is not set yet: what is recorded now gets its time, and a place here, when it is known.")
		}
		return nil
	}
	colour := term.ColorEnabled(w)
	title := windowText(h.from, h.to, zone)
	if each := ", a point each " + term.Span(time.Duration(h.step)*time.Millisecond); len(title)+len(each) <= width {
		title += each
	}
	fmt.Fprintln(w, term.Truncate(title, width))
	for _, s := range shown {
		c := term.Chart{Label: s.label, Unit: s.unit, Points: points[s.key], From: h.from, To: h.to, Step: h.step, Max: s.max,
			Width: max(width, term.MinChartWidth), Height: chartHeight(height, len(shown)), ASCII: ascii, Zone: zone}
		if s.maxKey != "" {
			c.Max = most[s.maxKey]
		}
		for i, l := range c.Lines() {
			if i == 0 {
				l = term.Paint(colour, term.Bold, l)
			}
			fmt.Fprintln(w, l)
		}
	}
	return nil
}

// shown are the series of the modules asked for that have points; a reading that has no
// place in the catalogue is drawn by its name.
func (h *historyQuery) shown(points map[string][]term.Point) []series {
	var out []series
	known := map[string]bool{}
	for _, s := range prober.Sensors() {
		known[s.Key] = s.Chart.Hidden
	}
	for _, s := range catalogue {
		known[s.key] = true
		if len(points[s.key]) > 0 {
			out = append(out, s)
		}
	}
	rest := []string{}
	for k := range points {
		if !known[k] {
			rest = append(rest, k)
		}
	}
	slices.SortFunc(rest, compareKeys)
	for _, k := range rest {
		out = append(out, series{key: k, label: k})
	}
	return out
}

// chartHeight is how many lines a plot may have so that n charts fit the terminal.
func chartHeight(lines, n int) int {
	h := (lines-2)/n - 3
	return min(max(h, 4), 12)
}

// windowText is a window for people, with the day once where it is one day.
func windowText(from, to int64, zone *time.Location) string {
	a, b := time.UnixMilli(from).In(zone), time.UnixMilli(to).In(zone)
	layout := time.DateTime
	if a.Format(time.DateOnly) == b.Format(time.DateOnly) {
		layout = time.TimeOnly
	}
	return a.Format(time.DateTime) + " to " + b.Format(layout+" MST")
}
