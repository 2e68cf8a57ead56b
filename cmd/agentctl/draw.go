package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Drawing with characters: a sparkline is one line of blocks, a chart has axes and dots.
// Both know UTF-8 (blocks, braille) and plain ASCII. They say nothing about colours.

// sparkline draws the newest values, one a column, width columns wide, between lo and hi.
// NaN is a gap.
func sparkline(values []float64, width int, lo, hi float64, ascii bool) string {
	levels := []rune("▁▂▃▄▅▆▇█")
	if ascii {
		levels = []rune("_.-:=+*#")
	}
	if len(values) > width {
		values = values[len(values)-width:]
	}
	var b strings.Builder
	b.WriteString(strings.Repeat(" ", width-len(values)))
	for _, v := range values {
		switch {
		case math.IsNaN(v):
			b.WriteByte(' ')
		case hi <= lo:
			b.WriteRune(levels[0])
		default:
			share := min(max((v-lo)/(hi-lo), 0), 1)
			b.WriteRune(levels[min(int(share*float64(len(levels))), len(levels)-1)])
		}
	}
	return b.String()
}

// point is a value at a time.
type point struct {
	ts int64 // milliseconds since 1970
	v  float64
}

// chart draws points over time.
type chart struct {
	label, unit string
	points      []point // in ascending order
	from, to    int64   // the window, milliseconds since 1970
	step        int64   // the least distance of two points, milliseconds
	max         float64 // where the scale ends; 0: where the points do
	width       int     // of the whole, in columns; at least minChartWidth
	height      int     // of the plot, in lines
	ascii       bool
	zone        *time.Location
}

const (
	axisWidth     = 11 // of the labels left of the plot
	minChartWidth = 24
)

// plotWidth is how many columns the plot of a chart has.
func plotWidth(width int) int { return max(width, minChartWidth) - axisWidth }

// lines draws the chart: a title, the plot, the axis of time and its labels.
func (c chart) lines() []string {
	lo, hi := c.scale()
	cells := c.plot(lo, hi)
	side, corner, tick := "│", "└", "┤"
	if c.ascii {
		side, corner, tick = "|", "+", "+"
	}
	out := []string{c.title()}
	for y, row := range cells {
		label, mark := "", side
		switch y {
		case 0:
			label, mark = valueText(hi, c.unit), tick
		case c.height - 1:
			label, mark = valueText(lo, c.unit), tick
		case (c.height - 1) / 2:
			if c.height%2 == 1 {
				label, mark = valueText((lo+hi)/2, c.unit), tick
			}
		}
		out = append(out, strings.TrimRight(fmt.Sprintf("%*s%s%s", axisWidth-1, label+" ", mark, string(row)), " "))
	}
	axis, labels := c.timeAxis()
	return append(out, strings.Repeat(" ", axisWidth-1)+corner+axis, strings.TrimRight(strings.Repeat(" ", axisWidth)+labels, " "))
}

func (c chart) title() string {
	t := fmt.Sprintf("%-8s", c.label)
	if len(c.points) == 0 {
		return t + " nothing recorded"
	}
	lo, hi, sum := math.Inf(1), math.Inf(-1), 0.0
	for _, p := range c.points {
		lo, hi, sum = min(lo, p.v), max(hi, p.v), sum+p.v
	}
	text := func(v float64) string { return valueText(v, c.unit) }
	last := c.points[len(c.points)-1].v
	t += fmt.Sprintf(" last %s  min %s  mean %s  max %s", text(last), text(lo), text(sum/float64(len(c.points))), text(hi))
	if r := []rune(t); len(r) > c.width {
		t = fmt.Sprintf("%-8s %s, %s to %s", c.label, text(last), text(lo), text(hi))
	}
	return cutLine(t, c.width)
}

// scale is the range of the plot. It begins at zero, except where that says nothing
// (temperatures).
func (c chart) scale() (lo, hi float64) {
	if len(c.points) == 0 {
		return 0, cmp.Or(c.max, 1)
	}
	byValue := func(a, b point) int {
		switch {
		case a.v < b.v:
			return -1
		case a.v > b.v:
			return 1
		}
		return 0
	}
	least, most := slices.MinFunc(c.points, byValue).v, slices.MaxFunc(c.points, byValue).v
	if c.unit == "C" {
		return math.Floor(least/10) * 10, max(math.Ceil(most/10)*10, math.Floor(least/10)*10+10)
	}
	switch {
	case c.max > 0 && most*4 >= c.max:
		return 0, max(c.max, most)
	case c.max > 0: // a little of all there is would be a flat line
		return 0, max(min(niceAbove(most), c.max), most)
	}
	return min(0, least), niceAbove(most)
}

// plot draws the points and what joins them into height rows. A braille character is a
// cell of 2 by 4 dots.
func (c chart) plot(lo, hi float64) [][]rune {
	w := plotWidth(c.width)
	cw, ch := 2, 4
	if c.ascii {
		cw, ch = 1, 1
	}
	rows := make([][]rune, c.height)
	for i := range rows {
		rows[i] = []rune(strings.Repeat(" ", w))
	}
	dot := func(x, y int) {
		cell := &rows[y/ch][x/cw]
		if c.ascii {
			*cell = '*'
			return
		}
		if *cell == ' ' {
			*cell = '\u2800'
		}
		*cell |= brailleDots[y%4][x%2]
	}
	place := func(p point) (x, y int) {
		x = int(float64(p.ts-c.from) / float64(max(c.to-c.from, 1)) * float64(w*cw))
		y = int(math.Round((hi - p.v) / max(hi-lo, 1e-12) * float64(c.height*ch-1)))
		return min(max(x, 0), w*cw-1), min(max(y, 0), c.height*ch-1)
	}
	gap := gapAfter(c.points, c.step)
	for i, p := range c.points {
		x, y := place(p)
		if i == 0 || p.ts-c.points[i-1].ts > gap {
			dot(x, y)
			continue
		}
		x0, y0 := place(c.points[i-1])
		joinDots(x0, y0, x, y, dot)
	}
	return rows
}

// brailleDots are the bits of the dots of a braille character, by row and column.
var brailleDots = [4][2]rune{{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}}

// gapAfter is the distance of two points from which on nothing was recorded between
// them: points come each step at the closest, and maybe less often by themselves.
func gapAfter(points []point, step int64) int64 {
	if len(points) < 2 {
		return step
	}
	d := make([]int64, 0, len(points)-1)
	for i := 1; i < len(points); i++ {
		d = append(d, points[i].ts-points[i-1].ts)
	}
	slices.Sort(d)
	return max(d[(len(d)-1)/2], step) * 5 / 2
}

// joinDots draws a line (Bresenham).
func joinDots(x0, y0, x1, y1 int, dot func(x, y int)) {
	dx, dy := abs(x1-x0), -abs(y1-y0)
	sx, sy := sign(x1-x0), sign(y1-y0)
	for e := dx + dy; ; {
		dot(x0, y0)
		if x0 == x1 && y0 == y1 {
			return
		}
		e2 := 2 * e
		if e2 >= dy {
			e += dy
			x0 += sx
		}
		if e2 <= dx {
			e += dx
			y0 += sy
		}
	}
}

func abs(n int) int {
	if n < 0 {
		return -n
	}
	return n
}

func sign(n int) int {
	switch {
	case n < 0:
		return -1
	case n > 0:
		return 1
	}
	return 0
}

// tickSteps are distances of time labels that a person reads easily.
var tickSteps = []time.Duration{time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second, 30 * time.Second,
	time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 15 * time.Minute, 30 * time.Minute,
	time.Hour, 2 * time.Hour, 3 * time.Hour, 6 * time.Hour, 12 * time.Hour,
	day, 2 * day, 7 * day, 14 * day, 30 * day, 90 * day, 365 * day}

const day = 24 * time.Hour

// timeAxis draws the axis and, below it, its labels: round times in c.zone.
func (c chart) timeAxis() (axis, labels string) {
	w := plotWidth(c.width)
	line, mark := "─", "┬"
	if c.ascii {
		line, mark = "-", "+"
	}
	span := time.Duration(max(c.to-c.from, 1)) * time.Millisecond
	layout, room := timeLayout(span)
	step := tickSteps[len(tickSteps)-1]
	for _, s := range tickSteps {
		if float64(s)/float64(span)*float64(w) >= float64(room) {
			step = s
			break
		}
	}
	axisCells := slices.Repeat([]string{line}, w)
	labelCells := []rune(strings.Repeat(" ", w+len(layout)))
	_, offset := time.UnixMilli(c.from).In(c.zone).Zone()
	ms, shift := step.Milliseconds(), int64(offset)*1000
	free := 0
	for t := (c.from+shift+ms-1)/ms*ms - shift; t <= c.to; t += ms {
		x := min(int(float64(t-c.from)/float64(span.Milliseconds())*float64(w)), w-1)
		text := time.UnixMilli(t).In(c.zone).Format(layout)
		axisCells[x] = mark
		at := min(max(x-len(text)/2, 0), w-len(text))
		if at < free {
			continue
		}
		copy(labelCells[at:], []rune(text))
		free = at + len(text) + 1
	}
	return strings.Join(axisCells, ""), strings.TrimRight(string(labelCells[:w]), " ")
}

// timeLayout is how times are written on an axis of this span, and the room for one.
func timeLayout(span time.Duration) (layout string, room int) {
	switch {
	case span <= 10*time.Minute:
		return time.TimeOnly, 12
	case span <= 2*day:
		return "15:04", 9
	case span <= 60*day:
		return "Jan 02", 10
	}
	return "2006-01-02", 14
}

// niceStep is the least readable distance of points that is not below d.
func niceStep(d time.Duration) time.Duration {
	for _, s := range append([]time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond}, tickSteps...) {
		if s >= d {
			return s
		}
	}
	return d
}

// cutLine cuts a line to width columns. Escape sequences take none and are kept.
func cutLine(s string, width int) string {
	var b strings.Builder
	n, esc := 0, false
	for _, r := range s {
		switch {
		case esc:
			esc = r != 'm'
		case r == '\x1b':
			esc = true
		default:
			if n++; n > width {
				continue
			}
		}
		b.WriteRune(r)
	}
	return b.String()
}
