package term

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Point is a value at a time.
type Point struct {
	TS    int64 // milliseconds since 1970
	Value float64
}

// Chart draws points over time: a title line, the plot, the time axis and its labels.
//
// A plot cell is a braille character of 2 by 4 dots, or one '*' with ASCII. Neighboring
// points are joined by a line unless they are so far apart that nothing was recorded in
// between (see maxGap).
type Chart struct {
	Label, Unit string
	Points      []Point // in ascending order of time
	From, To    int64   // the window, milliseconds since 1970
	Step        int64   // the smallest distance between two points, milliseconds
	Max         float64 // the end of the scale; 0: chosen from the points
	Width       int     // columns of the whole chart, at least MinChartWidth
	Height      int     // lines of the plot
	ASCII       bool
	Zone        *time.Location // of the time labels
}

const (
	// MinChartWidth is the smallest width of a chart in columns.
	MinChartWidth = 24

	axisWidth = 11 // columns left of the plot: a label, a space and the axis
)

// PlotWidth returns the number of columns that the plot of a chart of this width has.
func PlotWidth(width int) int { return max(width, MinChartWidth) - axisWidth }

// Lines draws the chart. It returns Height+3 lines of at most Width columns, without color.
func (c Chart) Lines() []string {
	low, high := c.scale()
	side, corner, tick := "│", "└", "┤"
	if c.ASCII {
		side, corner, tick = "|", "+", "+"
	}
	out := []string{c.title()}
	for y, row := range c.plot(low, high) {
		label, axis := "", tick
		switch {
		case y == 0:
			label = valueLabel(high, c.Unit)
		case y == c.Height-1:
			label = valueLabel(low, c.Unit)
		case 2*y == c.Height-1:
			label = valueLabel((low+high)/2, c.Unit)
		default:
			axis = side
		}
		line := fmt.Sprintf("%*s%s%s", axisWidth-1, label, axis, string(row))
		out = append(out, strings.TrimRight(line, " "))
	}
	axis, times := c.timeAxis()
	return append(out,
		strings.Repeat(" ", axisWidth-1)+corner+axis,
		strings.TrimRight(strings.Repeat(" ", axisWidth)+times, " "))
}

// valueLabel returns a value as the vertical axis shows it, with a space before the axis. A
// Value has at most nine characters, which fit into axisWidth.
func valueLabel(v float64, unit string) string { return Value(v, unit) + " " }

// title names the series and summarizes it, shorter when the chart is narrow:
//
//	CPU      last 40.9 %  min 16.2 %  mean 43.7 %  max 55.0 %
//	CPU      40.9 %, 16.2 % to 55.0 %
func (c Chart) title() string {
	label := fmt.Sprintf("%-8s", c.Label)
	if len(c.Points) == 0 {
		return label + " nothing recorded"
	}
	low, high := c.valueRange()
	sum := 0.0
	for _, p := range c.Points {
		sum += p.Value
	}
	text := func(v float64) string { return Value(v, c.Unit) }
	last := c.Points[len(c.Points)-1].Value
	title := fmt.Sprintf("%s last %s  min %s  mean %s  max %s", label,
		text(last), text(low), text(sum/float64(len(c.Points))), text(high))
	if len([]rune(title)) > c.Width {
		title = fmt.Sprintf("%s %s, %s to %s", label, text(last), text(low), text(high))
	}
	return Truncate(title, c.Width)
}

// valueRange returns the smallest and the largest value of Points, which must not be empty.
func (c Chart) valueRange() (low, high float64) {
	low, high = math.Inf(1), math.Inf(-1)
	for _, p := range c.Points {
		low, high = min(low, p.Value), max(high, p.Value)
	}
	return low, high
}

// scale returns the range of the vertical axis. It begins at zero, so that heights can be
// compared, except for temperatures, where zero would flatten the line. It ends at Max when
// the points are near Max, else at a round number above the highest point.
func (c Chart) scale() (low, high float64) {
	if len(c.Points) == 0 {
		return 0, cmp.Or(c.Max, 1)
	}
	low, high = c.valueRange()
	switch {
	case c.Unit == "C":
		floor := math.Floor(low/10) * 10
		return floor, max(math.Ceil(high/10)*10, floor+10)
	case c.Max > 0 && high*4 >= c.Max:
		return 0, max(c.Max, high)
	case c.Max > 0: // less than a quarter of Max would be a flat line on its scale
		return 0, max(min(NiceCeil(high), c.Max), high)
	}
	return min(0, low), NiceCeil(high)
}

// plot draws the points, and the lines that join them, into Height rows of cells. It works
// in dots, of which a cell has dotsX by dotsY; dot sets one, and position finds that of a
// point. What lies outside the window or the scale is drawn at its border.
func (c Chart) plot(low, high float64) [][]rune {
	width := PlotWidth(c.Width)
	dotsX, dotsY := 2, 4 // dots of a cell
	if c.ASCII {
		dotsX, dotsY = 1, 1
	}
	rows := make([][]rune, c.Height)
	for i := range rows {
		rows[i] = []rune(strings.Repeat(" ", width))
	}
	dot := func(x, y int) {
		cell := &rows[y/dotsY][x/dotsX]
		if c.ASCII {
			*cell = '*'
			return
		}
		if *cell == ' ' {
			*cell = '\u2800' // the empty braille pattern
		}
		*cell |= brailleDots[y%4][x%2]
	}
	position := func(p Point) (x, y int) {
		lastX, lastY := width*dotsX-1, c.Height*dotsY-1
		x = int(float64(p.TS-c.From) / float64(max(c.To-c.From, 1)) * float64(lastX+1))
		y = int(math.Round((high - p.Value) / max(high-low, 1e-12) * float64(lastY)))
		return min(max(x, 0), lastX), min(max(y, 0), lastY)
	}
	gap := maxGap(c.Points, c.Step)
	for i, p := range c.Points {
		x, y := position(p)
		if i == 0 || p.TS-c.Points[i-1].TS > gap {
			dot(x, y)
			continue
		}
		x0, y0 := position(c.Points[i-1])
		drawLine(x0, y0, x, y, dot)
	}
	return rows
}

// brailleDots are the bits of the dots of a braille character, by row and column
// (Unicode, block U+2800).
var brailleDots = [4][2]rune{{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}}

// maxGap returns the largest distance of two points that still belong to one line: 2.5 times
// the median distance, since a series may come less often than each step.
func maxGap(points []Point, step int64) int64 {
	if len(points) < 2 {
		return step
	}
	distances := make([]int64, len(points)-1)
	for i := range distances {
		distances[i] = points[i+1].TS - points[i].TS
	}
	slices.Sort(distances)
	return max(distances[(len(distances)-1)/2], step) * 5 / 2
}

// drawLine calls dot for each dot of a straight line (Bresenham's algorithm).
func drawLine(x0, y0, x1, y1 int, dot func(x, y int)) {
	dx, dy := max(x1-x0, x0-x1), min(y1-y0, y0-y1)
	stepX, stepY := cmp.Compare(x1, x0), cmp.Compare(y1, y0)
	for e := dx + dy; ; {
		dot(x0, y0)
		if x0 == x1 && y0 == y1 {
			return
		}
		e2 := 2 * e
		if e2 >= dy {
			e += dy
			x0 += stepX
		}
		if e2 <= dx {
			e += dx
			y0 += stepY
		}
	}
}

const day = 24 * time.Hour

// tickSteps are the easily readable distances between time labels.
var tickSteps = []time.Duration{
	time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second, 30 * time.Second,
	time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 15 * time.Minute, 30 * time.Minute,
	time.Hour, 2 * time.Hour, 3 * time.Hour, 6 * time.Hour, 12 * time.Hour,
	day, 2 * day, 7 * day, 14 * day, 30 * day, 90 * day, 365 * day,
}

// timeAxis draws the axis and, below it, labels at round times of the chart's zone. The
// step of the labels is the smallest of tickSteps at which each has enough columns. A label
// that would overlap the one before it is left out; its tick mark stays.
//
// Round times are multiples of the step since midnight in the zone: the zone's offset at
// the start of the window is added before rounding and subtracted after it.
func (c Chart) timeAxis() (axis, labels string) {
	width := PlotWidth(c.Width)
	line, mark := "─", "┬"
	if c.ASCII {
		line, mark = "-", "+"
	}
	span := time.Duration(max(c.To-c.From, 1)) * time.Millisecond
	layout, columns := timeLayout(span)
	step := tickSteps[len(tickSteps)-1]
	for _, s := range tickSteps {
		if float64(s)/float64(span)*float64(width) >= float64(columns) {
			step = s
			break
		}
	}
	axisCells := slices.Repeat([]string{line}, width)
	labelCells := []rune(strings.Repeat(" ", width+len(layout)))
	_, offset := time.UnixMilli(c.From).In(c.Zone).Zone()
	stepMS, shift := step.Milliseconds(), int64(offset)*1000
	free := 0 // the first column that no label has taken
	for t := (c.From+shift+stepMS-1)/stepMS*stepMS - shift; t <= c.To; t += stepMS {
		x := min(int(float64(t-c.From)/float64(span.Milliseconds())*float64(width)), width-1)
		axisCells[x] = mark
		text := time.UnixMilli(t).In(c.Zone).Format(layout)
		at := min(max(x-len(text)/2, 0), width-len(text))
		if at < free {
			continue
		}
		copy(labelCells[at:], []rune(text))
		free = at + len(text) + 1
	}
	return strings.Join(axisCells, ""), strings.TrimRight(string(labelCells[:width]), " ")
}

// timeLayout returns how an axis of this span writes times, and the columns that each needs.
func timeLayout(span time.Duration) (layout string, columns int) {
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

// NiceStep returns the smallest easily readable distance of points that is not below d.
func NiceStep(d time.Duration) time.Duration {
	const ms = time.Millisecond
	for _, s := range append([]time.Duration{100 * ms, 200 * ms, 500 * ms}, tickSteps...) {
		if s >= d {
			return s
		}
	}
	return d
}

// NiceCeil returns the smallest round number that is not below v: 1, 2, 3, 4, 5, 6, 8, 10,
// 20, ...
func NiceCeil(v float64) float64 {
	if v <= 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, digit := range []float64{1, 2, 3, 4, 5, 6, 8} {
		if digit*power >= v*(1-1e-9) { // v may be a rounding error above it
			return digit * power
		}
	}
	return 10 * power
}

// Sparkline draws the newest values as one line of blocks, a column each, width columns
// wide and right-aligned, on a scale from low to high. NaN is a gap. Values outside the
// scale are drawn at its ends; on an empty scale all values are at the bottom.
func Sparkline(values []float64, width int, low, high float64, ascii bool) string {
	levels := []rune("▁▂▃▄▅▆▇█")
	if ascii {
		levels = []rune("_.-:=+*#")
	}
	values = values[max(len(values)-width, 0):]
	var b strings.Builder
	b.WriteString(strings.Repeat(" ", width-len(values)))
	for _, v := range values {
		switch {
		case math.IsNaN(v):
			b.WriteByte(' ')
		case high <= low:
			b.WriteRune(levels[0])
		default:
			share := min(max((v-low)/(high-low), 0), 1)
			b.WriteRune(levels[min(int(share*float64(len(levels))), len(levels)-1)])
		}
	}
	return b.String()
}
