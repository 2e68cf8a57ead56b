package statedir

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// fake is a disk whose probes answer what the test says.
type fake struct {
	result result
	hang   chan struct{} // not nil: probes wait for its end
	writes []bool        // of each probe, whether it was asked to write
}

func newFake() (*Monitor, *fake) {
	m, f := New("/nowhere"), &fake{result: result{state: OK}}
	m.probe = func(_ *prober, write bool) result {
		f.writes = append(f.writes, write)
		if f.hang != nil {
			<-f.hang
		}
		r := f.result
		r.written = write && r.state == OK
		return r
	}
	return m, f
}

// poll polls each three seconds for d.
func poll(m *Monitor, d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(3 * time.Second) {
		m.Poll(false)
		synctest.Wait()
	}
}

// TestFaultsShowAndClear: each state shows within ten seconds, with its beginning, and clears within
// ten seconds; while it lasts, probes write.
func TestFaultsShowAndClear(t *testing.T) {
	for _, state := range []State{Full, ReadOnly, Failing} {
		synctest.Test(t, func(t *testing.T) {
			m, f := newFake()
			poll(m, time.Minute)
			if s := m.Status(); s.State != OK {
				t.Fatalf("status %+v", s)
			}
			f.result = result{state: state, detail: "why"}
			began := time.Now()
			poll(m, 10*time.Second)
			s := m.Status()
			if s.State != state || s.Detail != "why" || s.Since.Sub(began) > 10*time.Second {
				t.Errorf("status %+v, want %s", s, state)
			}
			since := s.Since
			poll(m, time.Minute)
			if s := m.Status(); !s.Since.Equal(since) {
				t.Errorf("since %v, later %v", since, s.Since)
			}
			if !f.writes[len(f.writes)-1] {
				t.Error("a probe after a failure does not write")
			}
			f.result = result{state: OK}
			poll(m, 10*time.Second)
			if s := m.Status(); s.State != OK || s.Detail != "" {
				t.Errorf("afterwards %+v", s)
			}
		})
	}
}

// TestProbesSpareTheCard: while all is well a probe writes once an hour.
func TestProbesSpareTheCard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, f := newFake()
		poll(m, 24*time.Hour)
		n := 0
		for _, w := range f.writes {
			if w {
				n++
			}
		}
		if n < 23 || n > 24 {
			t.Errorf("%d of %d probes of a day wrote, want one an hour", n, len(f.writes))
		}
		m.Poll(true)
		synctest.Wait()
		if !f.writes[len(f.writes)-1] {
			t.Error("a probe does not write although somebody else could not")
		}
	})
}

// TestHung: a probe that hangs shows within ten seconds, is the only one, and clears with its end.
func TestHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, f := newFake()
		poll(m, 10*time.Second)
		f.hang = make(chan struct{})
		n := len(f.writes)
		began := time.Now()
		poll(m, 10*time.Second)
		if s := m.Status(); s.State != Hung || s.Detail == "" || !s.Since.Equal(began) {
			t.Fatalf("status %+v, want hung since %v", s, began)
		}
		poll(m, time.Hour)
		if len(f.writes) != n+1 {
			t.Errorf("%d probes, want only the one that hangs", len(f.writes)-n)
		}
		close(f.hang)
		f.hang = nil
		synctest.Wait()
		if s := m.Status(); s.State != OK {
			t.Errorf("afterwards %+v", s)
		}
	})
}

// TestDo: an access that hangs holds its caller for five seconds, the next ones not at all, and
// shows as a hung disk.
func TestDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := newFake()
		wrong := errors.New("wrong")
		if v, err := Do(m, func() (int, error) { return 5, wrong }); v != 5 || !errors.Is(err, wrong) {
			t.Errorf("%d, %v", v, err)
		}
		hang := make(chan struct{})
		began := time.Now()
		if _, err := Do(m, func() (int, error) { <-hang; return 1, nil }); !errors.Is(err, ErrHung) || time.Since(began) != doTimeout {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if s := m.Status(); s.State != Hung {
			t.Errorf("status %+v", s)
		}
		began = time.Now()
		for range 100 {
			if _, err := Do(m, func() (int, error) { t.Error("it ran"); return 0, nil }); !errors.Is(err, ErrHung) || time.Since(began) != 0 {
				t.Fatalf("%v after %v", err, time.Since(began))
			}
		}
		close(hang)
		synctest.Wait()
		poll(m, 3*time.Second)
		if v, err := Do(m, func() (int, error) { return 2, nil }); v != 2 || err != nil || m.Status().State != OK {
			t.Errorf("afterwards %d, %v, %+v", v, err, m.Status())
		}
	})
}
