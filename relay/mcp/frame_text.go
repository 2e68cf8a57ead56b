package mcp

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"agentctl/strictjson"
)

// maxSummarized bounds the members that describeFrames summarizes.
const maxSummarized = 32

// figure is a number that frames have, over all of them.
type figure struct {
	name          string
	min, max, sum float64
	count         int
}

// describeFrames returns the text of a board's stream: a summary of its numbers, and then a frame
// a line, as the board sent them. A client without progress sees frames only here.
//
//	4 frames in 15 s; cpu_pct 23.08 to 25.58, mean 24.2; …
func describeFrames(frames [][]byte, took time.Duration) string {
	var figures []figure
	index := make(map[string]int)
	for _, f := range frames {
		if len(f) == 0 || f[0] != '{' {
			continue
		}
		for key, v := range strictjson.Object(f).Members {
			n, err := strconv.ParseFloat(string(v), 64)
			if err != nil || !isFigure(key) { // a time is no figure
				continue
			}
			i, ok := index[string(key)]
			if !ok {
				if len(figures) == maxSummarized {
					continue
				}
				i = len(figures)
				index[string(key)] = i
				figures = append(figures, figure{name: string(key), min: n, max: n})
			}
			g := &figures[i]
			g.min, g.max, g.sum, g.count = min(g.min, n), max(g.max, n), g.sum+n, g.count+1
		}
	}
	var b strings.Builder
	plural := "s"
	if len(frames) == 1 {
		plural = ""
	}
	fmt.Fprintf(&b, "%d frame%s in %d s", len(frames), plural, int(math.Round(took.Seconds())))
	for _, g := range figures {
		if g.min == g.max {
			fmt.Fprintf(&b, "; %s %s", g.name, shortNumber(g.min))
		} else {
			fmt.Fprintf(&b, "; %s %s to %s, mean %s", g.name, shortNumber(g.min), shortNumber(g.max), shortNumber(g.sum/float64(g.count)))
		}
	}
	for _, f := range frames {
		b.WriteByte('\n')
		b.Write(f)
	}
	return b.String()
}

// isFigure reports whether a member of a frame is worth a summary: its name is a plain word, and
// it is not a time.
func isFigure(name []byte) bool {
	for _, c := range name {
		if c != '_' && (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return len(name) > 0 && len(name) <= 64 && !strings.HasSuffix(string(name), "_ms")
}

// shortNumber writes a number with at most two decimals.
func shortNumber(n float64) string {
	return strconv.FormatFloat(math.Round(n*100)/100, 'f', -1, 64)
}
