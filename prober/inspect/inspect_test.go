package inspect

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A part that hangs is unfinished; the other parts are in the answer.
func TestCollectLeavesOutWhatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		defer close(hang)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var info Info
		unfinished := collect(ctx, new(guard), &info,
			part[Info]{"model", func(context.Context) func(*Info) { <-hang; return nil }},
			part[Info]{"os", func(context.Context) func(*Info) { return func(i *Info) { i.OS = "Debian" } }},
			part[Info]{"kernel", func(context.Context) func(*Info) { return nil }}, // cannot be read
		)
		if want := []string{"model", "kernel"}; !slices.Equal(unfinished, want) {
			t.Errorf("unfinished parts are %q, want %q", unfinished, want)
		}
		if info.OS != "Debian" {
			t.Errorf("os is %q, want that of the part that answered", info.OS)
		}
	})
}

// However often somebody asks, at most maxHung goroutines hang in the same part.
func TestCollectBoundsHungGoroutines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g guard
		var started atomic.Int32
		hang := make(chan struct{})
		hanging := part[Info]{"model", func(context.Context) func(*Info) { started.Add(1); <-hang; return nil }}
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			collect(ctx, &g, new(Info), hanging)
			cancel()
		}
		if n := started.Load(); n != maxHung {
			t.Errorf("10 calls started %d goroutines, want %d", n, maxHung)
		}
		close(hang)
		synctest.Wait()
		if len(g.running) != 0 {
			t.Errorf("the guard still counts %v after all have returned", g.running)
		}
	})
}

// Reads for one kind of answer do not count for another that has a part of the same name: system.info
// and system.processes both have "processes".
func TestCollectBoundsEachAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g guard
		slow := make(chan struct{})
		defer close(slow)
		for range maxHung {
			go collect(t.Context(), &g, new(Processes), part[Processes]{"processes", func(context.Context) func(*Processes) { <-slow; return nil }})
		}
		synctest.Wait()
		counted := part[Info]{"processes", func(context.Context) func(*Info) { return func(i *Info) { i.Processes = 1 } }}
		if unfinished := collect(t.Context(), &g, new(Info), counted); len(unfinished) > 0 {
			t.Errorf("unfinished parts are %q while the processes are read for other answers, want none", unfinished)
		}
	})
}

func TestText(t *testing.T) {
	const maxChars = 5
	for in, want := range map[string]string{
		"":                                  "",
		"abcdefgh":                          "abcde",
		"äöü€🙂x":                            "äöü€🙂",
		" a\x00b\tc":                        "a b c",
		"\u0085x":                           "x",
		"\xff\xfe":                          "\uFFFD",
		"a    b":                            "a", // cut, then without space at its end
		"a" + strings.Repeat("\xff", 1<<20): "a\uFFFD",
	} {
		if got := Text(in, maxChars); got != want {
			t.Errorf("Text(%.20q, %d) = %q, want %q", in, maxChars, got, want)
		}
	}
}

func TestPageOf(t *testing.T) {
	list := []int{0, 1, 2, 3}
	tests := []struct {
		skip, limit int
		want        []int
	}{
		{0, 3, []int{0, 1, 2}},
		{3, 3, []int{3}},
		{4, 3, nil},
		{99, 3, nil},
		{-1, 2, []int{0, 1}},
	}
	for _, tt := range tests {
		if got := pageOf(list, tt.skip, tt.limit); !slices.Equal(got, tt.want) {
			t.Errorf("pageOf(skip %d, limit %d) = %v, want %v", tt.skip, tt.limit, got, tt.want)
		}
	}
}
