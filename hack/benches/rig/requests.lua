-- wrk: one of the prepared bodies each time, with 16 characters of its own; the result as one line for a machine.
local mark = string.rep("@", 16)
local folder, count = os.getenv("BENCH_BODIES"), tonumber(os.getenv("BENCH_COUNT"))
local path, run = os.getenv("BENCH_PATH"), tonumber(os.getenv("BENCH_RUN"))
local pause = tonumber(os.getenv("BENCH_PAUSE"))
local heads, tails, sent = {}, {}, 0

function init(args)
  for n = 1, count do
    local file = assert(io.open(folder .. "/" .. n, "rb"))
    local body = file:read("*a")
    file:close()
    local at = assert(body:find(mark, 1, true))
    heads[n] = table.concat({
      "POST " .. path .. " HTTP/1.1", "Host: bench", "Content-Type: application/json", "Accept: application/json",
      "Accept-Encoding: identity", "User-Agent: OpenAI/Python 2.0", "Authorization: Bearer bench",
      "X-Stainless-Lang: python", "X-Stainless-Runtime: CPython", "X-Stainless-Retry-Count: 0",
      "Content-Length: " .. #body, "", "",
    }, "\r\n") .. body:sub(1, at - 1)
    tails[n] = body:sub(at + #mark)
  end
  io.write("BODIES READ\n")
  io.flush()
end

function request()
  sent = sent + 1
  local n = (sent * 7919 + run) % count + 1
  return heads[n] .. string.format("%08x%08x", run, sent) .. tails[n]
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    "\nRESULT requests=%d failed=%d p50=%.1f p99=%.1f\n", summary.requests,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50), latency:percentile(99)
  ))
end

if pause > 0 then -- milliseconds, at most
  function delay()
    return math.random(0, pause)
  end
end
