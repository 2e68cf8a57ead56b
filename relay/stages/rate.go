package stages

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/time/rate"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
	"agentctl/transport/edge"
)

// Bounds of rate.
const (
	maxLimits = 8
	maxRPS    = 100_000
	maxKeys   = 65_536
)

// rateLimit is one limit of the operator.
type rateLimit struct {
	Per   string  `json:"per"`   // agent, tenant or plugin
	RPS   float64 `json:"rps"`   // calls a second in the long run
	Burst int     `json:"burst"` // calls at once
}

// limiter holds each agent, tenant or plugin to the operator's limits, on top of those
// of the capabilities. It remembers the MaxKeys that called last; one that it forgot
// begins with a full burst. A call that a limit refuses costs the other limits nothing.
type limiter struct {
	cfg struct {
		Limits  []rateLimit `json:"limits"`
		MaxKeys int         `json:"max_keys"`
	}
	buckets []*edge.Limiter // one for each of cfg.Limits
}

func newRate(_ *env, config []byte) (stage, error) {
	l := &limiter{}
	l.cfg.Limits, l.cfg.MaxKeys = []rateLimit{{Per: "agent", RPS: 50, Burst: 100}}, 4096
	var limits []strictjson.Raw
	wantKeys := fmt.Sprintf("a whole number from 1 to %d", maxKeys)
	err := decode("rate", config,
		field{"limits", &limits, "a list of limits"},
		field{"max_keys", &l.cfg.MaxKeys, wantKeys})
	if err == nil && limits != nil {
		l.cfg.Limits, err = decodeList("rate.limits", limits, maxLimits, newRateLimit)
	}
	if err == nil && (l.cfg.MaxKeys < 1 || l.cfg.MaxKeys > maxKeys) {
		err = wrong("rate.max_keys", wantKeys)
	}
	for range l.cfg.Limits {
		l.buckets = append(l.buckets, edge.NewLimiter(l.cfg.MaxKeys, true))
	}
	return l, err
}

func newRateLimit(where string, data []byte) (l rateLimit, err error) {
	wantRPS, wantBurst := fmt.Sprintf("a number above 0, at most %d", maxRPS), fmt.Sprintf("a whole number from 1 to %d", maxRPS)
	l.Burst = 1
	err = decode(where, data,
		field{"per", &l.Per, "agent, tenant or plugin"},
		field{"rps", &l.RPS, wantRPS},
		field{"burst", &l.Burst, wantBurst})
	switch {
	case err != nil:
	case l.RPS <= 0 || l.RPS > maxRPS:
		err = wrong(where+".rps", wantRPS)
	case l.Burst < 1 || l.Burst > maxRPS:
		err = wrong(where+".burst", wantBurst)
	default:
		err = oneOf(where+".per", l.Per, "agent", "tenant", "plugin")
	}
	return l, err
}

func (l *limiter) config() any { return l.cfg }

func (l *limiter) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		if wait := l.take(r, time.Now()); wait > 0 {
			return nil, &manifest.Error{Code: manifest.RateLimited, Message: "a rate limit of this relay's operator is used up; retry later",
				RetryAfterMS: max(1, (wait + time.Millisecond - 1).Milliseconds()), Reason: "operator_rate"}
		}
		return next(ctx, r)
	}
}

// take spends one token of every limit, or none and tells how long to wait.
func (l *limiter) take(r *kernel.Request, now time.Time) time.Duration {
	var taken [maxLimits]*rate.Reservation
	for i, limit := range l.cfg.Limits {
		res := l.buckets[i].Bucket(key(limit.Per, r), limit.RPS, limit.Burst, now).ReserveN(now, 1)
		if wait := res.DelayFrom(now); wait > 0 {
			res.CancelAt(now)
			for _, t := range taken[:i] {
				t.CancelAt(now)
			}
			return wait
		}
		taken[i] = res
	}
	return 0
}

func key(per string, r *kernel.Request) string {
	switch per {
	case "agent":
		return r.Caller.Tenant + "\x00" + r.Caller.Actor
	case "tenant":
		return r.Caller.Tenant
	}
	return r.Plugin()
}
