package history

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/prober"
)

// script is a Sampler that plays samples and ends.
type script []prober.Sample

var errPlayed = errors.New("played to the end")

func (script) Interval() time.Duration { return time.Second }

func (sc script) Watch(ctx context.Context, _ time.Duration, fn func(prober.Sample) error) error {
	for _, x := range sc {
		if err := fn(x); err != nil {
			return err
		}
	}
	return errPlayed
}

// TestRecordModules checks that readings are recorded every ten seconds, traffic as the mean
// of that time, and that an old reading is not recorded again.
func TestRecordModules(t *testing.T) {
	s, c := open(t, Options{})
	yes, no, used := true, false, 30.0
	wear := &prober.Wear{UsedPct: &used, PreEOL: prober.EOLWarning}
	power := &prober.Power{UnderVoltage: &yes, Throttled: &no}
	var play script
	for i := range 21 {
		c.step(time.Second)
		x := c.sample(i)
		x.Modules = &prober.ModuleReadings{
			Network:     &prober.Network{WindowMS: 1000, BytesIn: uint64(100 * i), BytesOut: 7},
			Temperature: &prober.Temperature{HottestC: 40 + float64(i)/2},
			Power:       power,
			Wear:        wear,
		}
		if i == 15 {
			x.Modules.Network.ErrorsIn = 3
		}
		if i == 18 {
			power = &prober.Power{UnderVoltage: &no, Throttled: &no}
		}
		play = append(play, x)
	}
	if err := s.Record(t.Context(), play); !errors.Is(err, errPlayed) {
		t.Fatalf("Record: %v", err)
	}
	var got []string
	for _, r := range query(t, s, Query{FromMS: epoch}) {
		if !r.HasSample {
			t.Errorf("row %+v has no sample", r)
		}
		if len(r.Modules) > 0 {
			got = append(got, fmt.Sprint((r.TSMS-epoch)/1000, " ", r.Modules))
		}
	}
	want := []string{
		"1 [{network.bytes_in_per_s 0} {network.bytes_out_per_s 7} {power.throttled 0} {power.under_voltage 1} {temperature.hottest_c 40} {wear.pre_eol 1} {wear.used_pct 30}]",
		"11 [{network.bytes_in_per_s 550} {network.bytes_out_per_s 7} {temperature.hottest_c 45}]",
		"21 [{network.bytes_in_per_s 1550} {network.bytes_out_per_s 7} {network.errors_in 3} {network.errors_out 0} {power.throttled 0} {power.under_voltage 0} {temperature.hottest_c 50}]",
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("readings:\n%v\nwant:\n%v", got, want)
	}
	if st := s.Stats(); st.Rows != 21 || st.Unsaved != 0 || st.Dropped != 0 {
		t.Errorf("stats %+v, want 21 rows", st)
	}
}

// crowded is a Sampler that refuses watchers with ErrBusy at first.
type crowded struct {
	script
	tries int
}

func (c *crowded) Watch(ctx context.Context, d time.Duration, fn func(prober.Sample) error) error {
	if c.tries++; c.tries < 3 {
		return prober.ErrBusy
	}
	return c.script.Watch(ctx, d, fn)
}

// TestRecordRetriesWhenBusy checks that Record retries when the prober has too many watchers.
func TestRecordRetriesWhenBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, c := open(t, Options{Path: quickDir(t) + "/history.db"})
		begin := time.Now()
		err := s.Record(t.Context(), &crowded{script: script{c.sample(1)}})
		if took := time.Since(begin); !errors.Is(err, errPlayed) || took != 2*retryInterval || s.Stats().Rows != 1 {
			t.Errorf("Record: %v after %v, %d rows; want to the end after %v", err, took, s.Stats().Rows, 2*retryInterval)
		}
	})
}
