//go:build linux

package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
)

// bar is one thing that agentctl must reach. Smaller is better, unless more is set.
type bar struct {
	name              string
	measured          float64
	required, stretch float64 // 0: none
	more              bool
	format            string // of the figures, such as "%.2f x"
	void              string // why the figure says nothing; "": it does
}

func (b *bar) meets(limit float64) bool {
	if b.more {
		return b.measured >= limit
	}
	return b.measured <= limit
}

// pass is the last column of the table.
func (b *bar) pass() string {
	switch {
	case b.void != "":
		return "void: " + b.void
	case b.required == 0:
		return "-"
	case b.stretch != 0 && b.meets(b.stretch):
		return "yes, stretch"
	case b.meets(b.required):
		return "yes"
	}
	return "NO"
}

func (b *bar) limit(v float64) string {
	if v == 0 {
		return "-"
	}
	sign := "<="
	if b.more {
		sign = ">="
	}
	return sign + " " + fmt.Sprintf(b.format, v)
}

// report collects the bars, and what could not be measured.
type report struct {
	bars   []bar
	failed []error
	peers  []string // that are absent, with the reason
	pair   *daemons
}

func (r *report) add(b bar) {
	r.bars = append(r.bars, b)
	fmt.Printf("=> %s: %s", b.name, fmt.Sprintf(b.format, b.measured))
	if b.void != "" {
		fmt.Printf(" (void: %s)", b.void)
	}
	fmt.Println()
}

func (r *report) missing(part string, err error) {
	err = fmt.Errorf("%s: %w", part, err)
	r.failed = append(r.failed, err)
	fmt.Printf("NOT MEASURED: %v\n", err)
}

// absent notes a peer that agentctl could not be compared with.
func (r *report) absent(peer string, why error) {
	r.peers = append(r.peers, fmt.Sprintf("absent: %s: %v", peer, why))
	fmt.Println(r.peers[len(r.peers)-1])
}

func (r *report) table() string {
	var s strings.Builder
	w := tabwriter.NewWriter(&s, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "bar\tmeasured\trequired\tstretch\tpass")
	missed := 0
	for i := range r.bars {
		b := &r.bars[i]
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", b.name, fmt.Sprintf(b.format, b.measured), b.limit(b.required), b.limit(b.stretch), b.pass())
		if b.pass() == "NO" {
			missed++
		}
	}
	_ = w.Flush()
	if missed > 0 {
		fmt.Fprintf(&s, "%d bar(s) missed\n", missed)
	}
	for _, peer := range r.peers {
		fmt.Fprintln(&s, peer)
	}
	for _, err := range r.failed {
		fmt.Fprintf(&s, "not measured: %v\n", err)
	}
	return s.String()
}

func (r *report) err() error {
	if len(r.failed) > 0 {
		return fmt.Errorf("not everything could be measured: %w", errors.Join(r.failed...))
	}
	return nil
}

func median(v []float64) float64 { return quantile(v, 0.5) }

// quantile is the value that a share q of v does not exceed.
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return s[min(int(q*float64(len(s))), len(s)-1)]
}

// ratios divides a by b, round by round: a disturbance of the machine affects neighboring rounds equally.
func ratios(a, b []float64) []float64 {
	r := make([]float64, min(len(a), len(b)))
	for i := range r {
		r[i] = a[i] / b[i]
	}
	return r
}

func list(v []float64, format string) string {
	s := make([]string, len(v))
	for i := range v {
		s[i] = fmt.Sprintf(format, v[i])
	}
	return strings.Join(s, " ")
}
