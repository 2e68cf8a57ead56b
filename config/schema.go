package config

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"agentctl/duration"
	"agentctl/prober"
	"agentctl/prober/alert"
)

// schemaURL is the $id of the schema, which is published as docs/config.schema.json.
const schemaURL = "https://agentctl.invalid/schemas/config.schema.json"

// object is a JSON object.
type object = map[string]any

// configSchema returns the JSON Schema (draft 2020-12) of a configuration file.
//
// It accepts all that the daemon accepts. Only the daemon checks bounds of durations, and
// values that depend on each other (agentctl config validate).
func configSchema() object {
	top := object{}
	for i := range keys {
		k := &keys[i]
		group, leaf, nested := strings.Cut(k.Name, ".")
		if !nested {
			top[k.Name] = k.schema()
			continue
		}
		if top[group] == nil {
			top[group] = object{"type": []string{"object", "null"}, "additionalProperties": false, "properties": object{}}
		}
		properties := top[group].(object)["properties"].(object)
		properties[leaf] = k.schema()
		if m, ok := prober.ModuleByName(leaf); ok && group == "module_intervals" && m.OtherName() != "" {
			properties[m.OtherName()] = k.schema()
		}
	}
	var twice []any // by two names of a module
	for m := range prober.NumModules {
		if other := m.OtherName(); other != "" {
			twice = append(twice, object{"required": []string{m.String(), other}})
		}
	}
	top["module_intervals"].(object)["not"] = object{"anyOf": twice}
	return object{"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": schemaURL,
		"title": "agentctl configuration", "type": []string{"object", "null"}, "additionalProperties": false, "properties": top}
}

// schema returns the schema of a value in a file.
//
// A default that depends on the user is left out: the published schema has to be the same
// whoever builds it.
//
// The patterns repeat what the checks of package manifest and of path values accept; a test
// compares the published schema with this function, not with the checks.
func (k *Key) schema() object {
	s := object{"description": k.doc}
	switch k.Kind {
	case KindText, KindPath:
		s["type"] = "string"
		if len(k.Words) > 0 {
			s["enum"] = k.Words
		} else {
			s["maxLength"] = 4096
		}
		if k.Kind == KindPath {
			s["pattern"] = "^/"
		}
		if k.Name == "name" {
			s["pattern"] = "^([a-z0-9][a-z0-9-]{0,31})?$"
		}
	case KindInt:
		s["type"], s["minimum"], s["maximum"] = "integer", k.min, k.max
	case KindBool:
		s["type"] = "boolean"
	case KindDuration:
		s = durationSchema(k.doc)
		if k.zero == "" {
			s["not"] = object{"const": 0}
		}
	case KindWords:
		s["type"], s["uniqueItems"] = "array", true
		words := slices.Clone(k.Words)
		if k.Name == "modules" {
			for _, w := range k.Words {
				if m, _ := prober.ModuleByName(w); m.OtherName() != "" {
					words = append(words, m.OtherName())
				}
			}
		}
		s["items"] = object{"enum": words}
	case KindRules:
		s["type"], s["maxItems"], s["items"] = "array", alert.MaxRules, ruleSchema()
	}
	switch v := k.def().(type) {
	case time.Duration:
		s["default"] = duration.Format(v)
	case []alert.Rule:
		s["default"] = []any{}
	case string:
		if k.Kind != KindPath || k.Name == "disk_path" { // the others depend on the user
			s["default"] = v
		}
	case int64:
		if v != 0 {
			s["default"] = v
		}
	default:
		s["default"] = v
	}
	return s
}

// durationSchema returns the schema of a duration: a text with units, or the number 0.
func durationSchema(doc string) object {
	return object{"description": doc + " Numbers with a unit (w, d, h, m, s, ms) each.",
		"anyOf": []any{object{"type": "string", "pattern": duration.Pattern}, object{"const": 0}}}
}

// ruleSchema returns the schema of an alert rule. Metrics and operators come from package
// alert, so that a new metric is in the schema with the next build.
func ruleSchema() object {
	text := func(doc string, words ...string) object {
		return object{"type": "string", "enum": words, "description": doc}
	}
	return object{"type": "object", "additionalProperties": false,
		"required": []string{"id", "metric", "op", "threshold", "level"},
		"properties": object{
			"id":         object{"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]{0,63}$", "description": "Name of the rule, unique among the rules."},
			"metric":     text("The figure to watch.", slices.Concat(alert.MetricNames(), alert.OtherMetricNames())...),
			"op":         text("How it is compared.", string(alert.Above), string(alert.AtLeast), string(alert.Below), string(alert.AtMost)),
			"threshold":  object{"type": "number", "description": "In the metric's unit; flags are 0 and 1."},
			"hysteresis": object{"type": "number", "minimum": 0, "description": "How far back past the threshold the value must return to clear the alert. Default 0."},
			"for":        durationSchema("How long the condition must hold before the alert is raised, up to 24h. Default: at once."),
			"clear_for":  durationSchema("How long the value must have returned before the alert is cleared, up to 24h. Default: for."),
			"level":      text("How severe the alert is.", string(alert.Info), string(alert.Warn), string(alert.Error)),
		}}
}

// SchemaJSON returns the schema as it is published.
func SchemaJSON() ([]byte, error) {
	b, err := json.MarshalIndent(configSchema(), "", "  ")
	return append(b, '\n'), err
}
