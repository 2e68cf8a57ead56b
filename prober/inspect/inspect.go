// Package inspect reads what a machine is and what it does: its system, processes, file systems and
// network. It answers when somebody asks and reads nothing at rest.
//
//	m := inspect.New(inspect.Options{Version: "1.4.0", Now: clock.NowMS})
//	ctx, cancel := context.WithTimeout(ctx, 1800*time.Millisecond)
//	defer cancel()
//	info := m.Info(ctx)
//	fmt.Println(info.Model, info.Unfinished) // what could not be read in time
//
// A machine in trouble is the usual case here: disks that hang, 100,000 processes, processes that
// end while they are read, 10,000 mounts. Each answer is bounded, comes when the context ends at
// the latest, and names what is missing in Unfinished. Text of the machine is cut, valid UTF-8 and
// without control characters.
//
// What may hang in the kernel runs in separate goroutines, at most maxHung for each part of an
// answer. One that hangs is left to the end of the process, since nothing can end it.
//
// gopsutil reads the counters of drives and interfaces and the use of file systems. Processes are
// read here, because gopsutil opens five files for each of them and this package one; and the
// system, because gopsutil's package for it starts programs and compiles regular expressions at
// the start of every process.
package inspect

import (
	"context"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Options configure a Machine.
type Options struct {
	Root         string                     // of the files that are read; "" for /. Tests have their trees
	Version      string                     // of this program
	Now          func() (ms int64, ok bool) // milliseconds since 1970; nil or false: not known
	Synchronized func() bool                // whether NTP keeps the clock; nil: not known
}

// now is Options.Now for a clock that may be missing.
func (o *Options) now() (int64, bool) {
	if o.Now == nil {
		return 0, false
	}
	return o.Now()
}

// maxHung bounds the goroutines of one part of an answer. It is the number of calls that run at a
// time, so that a part that hangs costs the next calls that part and nothing else.
const maxHung = 2

// guard counts the goroutines that read. Its zero value is ready.
type guard struct {
	mu      sync.Mutex     // protects running
	running map[string]int // by name
}

// start reports whether another goroutine of that name may start, and counts it.
func (g *guard) start(name string, most int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.running[name] >= most {
		return false
	}
	if g.running == nil {
		g.running = make(map[string]int)
	}
	g.running[name]++
	return true
}

// end counts a goroutine that ends.
func (g *guard) end(name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.running[name]--; g.running[name] == 0 {
		delete(g.running, name)
	}
}

// part is one part of an answer of type T. read runs in a separate goroutine and returns a
// function that enters what it read into the answer, or nil if it cannot be read. It should return
// soon after ctx ends.
type part[T any] struct {
	name string
	read func(ctx context.Context) func(*T)
}

// collect reads all parts at the same time and enters them into out. It returns the names of those
// that cannot be read or were not read when ctx ended, in the order of parts.
func collect[T any](ctx context.Context, g *guard, out *T, parts ...part[T]) (unfinished []string) {
	type result struct {
		i     int
		enter func(*T)
	}
	results := make(chan result, len(parts)) // a part that comes too late has no receiver
	done := make([]bool, len(parts))
	waiting := 0
	for i, p := range parts {
		if !g.start(p.name, maxHung) {
			continue
		}
		waiting++
		go func() {
			enter := p.read(ctx)
			g.end(p.name) // first: the caller may ask again at once
			results <- result{i, enter}
		}()
	}
	for ; waiting > 0; waiting-- {
		select {
		case r := <-results:
			if r.enter != nil {
				r.enter(out)
				done[r.i] = true
			}
			continue
		case <-ctx.Done():
		}
		break
	}
	for i, p := range parts {
		if !done[i] {
			unfinished = append(unfinished, p.name)
		}
	}
	return unfinished
}

// Text returns text of the machine as an answer may have it: at most most characters of valid UTF-8
// without control characters and without space at its ends.
func Text(s string, most int) string {
	if len(s) > utf8.UTFMax*most {
		s = s[:utf8.UTFMax*most] // what follows is cut below, and needs no reading
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
	s = strings.TrimSpace(s)
	for i, n := 0, 0; i < len(s); n++ {
		if n == most {
			return strings.TrimSpace(s[:i])
		}
		_, size := utf8.DecodeRuneInString(s[i:])
		i += size
	}
	return s
}

// window returns the elements of a list from skip on, at most most.
func window[T any](list []T, skip, most int) []T {
	skip = min(max(skip, 0), len(list))
	return list[skip:min(skip+most, len(list))]
}

// addUnfinished adds a name once.
func addUnfinished(list []string, name string) []string {
	if slices.Contains(list, name) {
		return list
	}
	return append(list, name)
}
