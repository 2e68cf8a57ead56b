package daemon

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"agentctl/prober"
)

// source is a machine whose readings the test controls.
type source struct {
	read func() error
}

func (s *source) Read(out *prober.Sample) error {
	*out = prober.Sample{MemTotalBytes: 1 << 30, MemBytes: 1 << 20, DiskPct: 1}
	return s.read()
}

func (s *source) Close() error { return nil }

// TestFeedWatchdog checks that the watchdog is fed while the scheduler ticks, even when
// readings fail, and no longer than its bound when the scheduler hangs.
func TestFeedWatchdog(t *testing.T) {
	const timeout = 4 * time.Second
	tests := []struct {
		name     string
		interval time.Duration
		fails    bool
		hangsAt  int // the reading that does not return; 0: none does
		fedFor   time.Duration
	}{
		{name: "samples", interval: time.Second},
		{name: "slow cadence", interval: time.Minute},
		{name: "readings that fail", interval: time.Second, fails: true},
		{name: "a reading that hangs", interval: time.Second, hangsAt: 10, fedFor: 8*time.Second + time.Second + timeout/2},
		{name: "the first reading hangs", interval: time.Second, hangsAt: 1, fedFor: time.Second + timeout/2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				n, release := 0, make(chan struct{})
				p := prober.New(prober.Options{Interval: tt.interval, Source: &source{func() error {
					if n++; n == tt.hangsAt {
						<-release
					}
					if tt.fails {
						return errors.New("no /proc here")
					}
					return nil
				}}})
				go func() { _ = p.Run(ctx) }()
				begin, last, longest := time.Now(), time.Now(), time.Duration(0)
				done := make(chan struct{})
				go func() {
					defer close(done)
					feedWatchdog(ctx, p, timeout, func() {
						longest = max(longest, time.Since(last))
						last = time.Now()
					})
				}()
				time.Sleep(5 * time.Minute)
				cancel()
				<-done
				close(release)
				synctest.Wait()

				fed := last.Sub(begin)
				switch {
				case tt.fedFor == 0 && (fed < 5*time.Minute-timeout/2 || longest > timeout/2):
					t.Errorf("fed until %v with a gap of %v, want until the end and no gap above %v", fed, longest, timeout/2)
				case tt.fedFor > 0 && (fed > tt.fedFor+timeout/4 || fed < tt.fedFor-timeout/2):
					t.Errorf("fed until %v, want about %v", fed, tt.fedFor)
				}
			})
		})
	}
}

// TestSuperviseScheduler checks the messages to the service manager on a real socket.
func TestSuperviseScheduler(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	ln, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "40000")
	t.Setenv("WATCHDOG_PID", "")
	receive := func() string {
		t.Helper()
		b := make([]byte, 512)
		_ = ln.SetReadDeadline(time.Now().Add(20 * time.Second))
		n, err := ln.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}

	ctx, cancel := context.WithCancel(t.Context())
	p := prober.New(prober.Options{Interval: time.Second})
	ended := make(chan error, 1)
	go func() { ended <- superviseScheduler(ctx, p, zap.NewNop()) }()
	if got := receive(); got != "WATCHDOG=1" {
		t.Errorf("received %q, want WATCHDOG=1", got)
	}
	cancel()
	got := receive()
	for got == "WATCHDOG=1" {
		got = receive()
	}
	if want := "STOPPING=1\nEXTEND_TIMEOUT_USEC=30000000"; got != want {
		t.Errorf("received %q, want %q", got, want)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}
