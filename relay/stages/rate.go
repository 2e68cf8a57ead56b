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
	RPS   float64 `json:"rps"`   // sustained calls per second
	Burst int     `json:"burst"` // calls at once
}

// limiter applies the operator's limits to each agent, tenant or plugin, in addition to the
// limits of the capabilities. It keeps the token buckets of the MaxKeys most recent callers;
// an evicted one starts over with a full burst. A call that one limit refuses takes no tokens
// from the others.
type limiter struct {
	cfg struct {
		Limits  []rateLimit `json:"limits"`
		MaxKeys int         `json:"max_keys"`
	}
	buckets []*edge.Limiter // one for each of cfg.Limits
}

// newRate makes the stage. By default it has one limit per agent.
func newRate(_ *env, config []byte) (stage, error) {
	l := &limiter{}
	l.cfg.Limits, l.cfg.MaxKeys = []rateLimit{{Per: "agent", RPS: 50, Burst: 100}}, 4096
	var limits []strictjson.Raw
	err := decode("rate", config,
		field{"limits", &limits, "a list of limits", nil},
		intField("max_keys", &l.cfg.MaxKeys, 1, maxKeys))
	if err == nil && limits != nil {
		l.cfg.Limits, err = decodeList("rate.limits", limits, maxLimits, decodeRateLimit)
	}
	for range l.cfg.Limits {
		l.buckets = append(l.buckets, edge.NewLimiter(l.cfg.MaxKeys, true))
	}
	return l, err
}

// decodeRateLimit reads one limit. Without a burst, calls are spread evenly.
func decodeRateLimit(where string, data []byte) (l rateLimit, err error) {
	l.Burst = 1
	return l, decode(where, data,
		field{"rps", &l.RPS, fmt.Sprintf("a number above 0, at most %d", maxRPS), func() bool { return l.RPS > 0 && l.RPS <= maxRPS }},
		intField("burst", &l.Burst, 1, maxRPS),
		enumField("per", &l.Per, "agent", "tenant", "plugin"))
}

func (l *limiter) config() any { return l.cfg }

// wrap refuses a request over a limit with the time after which a retry can succeed.
func (l *limiter) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		if wait := l.take(r, time.Now()); wait > 0 {
			return nil, &manifest.Error{Code: manifest.RateLimited, Message: "a rate limit of this relay's operator is used up; retry later",
				RetryAfterMS: max(1, (wait + time.Millisecond - 1).Milliseconds()), Reason: "operator_rate"}
		}
		return next(ctx, r)
	}
}

// take takes one token of each limit. If one has none, it takes none at all and returns
// how long to wait. That is the wait for this limit alone, so a retry may meet another one.
//
// A reservation that was made is canceled to return its token.
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

// key selects the bucket of a request. The tenant is part of an agent's key: agents of
// different tenants may have the same name.
func key(per string, r *kernel.Request) string {
	switch per {
	case "agent":
		return r.Caller.Tenant + "\x00" + r.Caller.Actor
	case "tenant":
		return r.Caller.Tenant
	}
	return r.Plugin()
}
