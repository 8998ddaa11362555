// The operators of the CUDA provider as a session runs them, beside those of the CPU on the same nodes and tensors:
// what they answer, which memory they take, and what they refuse.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/op_cuda.h"
#include "cuda_on_cpu/shim.h"
#include "cuda_on_cpu/tests/fake_runtime.h"
#include "hadamard/op_cuda.h"
#include "matmul/op_cuda.h"
#include "tests/check.h"
#include "tests/product_case.h"
#include "tests/transforms.h"

using namespace graphrot;
using fake::Call;
using fake::Kernel;
using fake::Memory;
using fake::Node;
using fake::Tensor;

namespace {

const ort::Api api(fake::table());

template <class T>
constexpr ort::ElementType kType = ort::kFloat32;
template <>
constexpr ort::ElementType kType<Half> = ort::kFloat16;
template <>
constexpr ort::ElementType kType<BFloat16> = ort::kBFloat16;

template <class T>
Tensor random_tensor(std::vector<std::int64_t> shape, std::uint64_t seed) {
  test::Random random(seed);
  Tensor made{kType<T>, shape, nullptr};
  std::vector<T> values(made.count());
  for (T& value : values) from_float(static_cast<float>(random.next()), &value);
  return fake::tensor(kType<T>, std::move(shape), values);
}

template <class T>
std::vector<double> numbers(const Tensor& tensor) {
  std::vector<double> result;
  for (const T value : tensor.values<T>()) result.push_back(static_cast<double>(to_float(value)));
  return result;
}

// Of the largest magnitude.
double difference(const std::vector<double>& found, const std::vector<double>& expected) {
  double most = 0, largest = 1e-30;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    most = std::fmax(most, std::isnan(found[i]) ? 1e30 : std::fabs(found[i] - expected[i]));
    largest = std::fmax(largest, std::fabs(expected[i]));
  }
  return found.size() == expected.size() ? most / largest : 1e30;
}

// The attributes of a transform: K = `order`, 2^levels = `width`.
void put_transform(Node& node, std::int64_t order, std::int64_t width) {
  const auto matrix = [](std::int64_t n, const std::vector<std::int8_t>& values) {
    return fake::tensor(ort::kInt8, {n, n}, values);
  };
  std::vector<std::int8_t> factor, sylvester;
  for (const float entry : test::hadamard(static_cast<std::size_t>(order))) factor.push_back(entry < 0 ? -1 : 1);
  for (std::int64_t i = 0; i < width * width; ++i) {
    bool odd = false;
    for (std::int64_t common = (i / width) & (i % width); common != 0; common &= common - 1) odd = !odd;
    sylvester.push_back(odd ? -1 : 1);
  }
  node.tensors["factor"] = matrix(order, factor);
  node.tensors["left"] = matrix(1, {1});
  node.tensors["right"] = matrix(width, sylvester);
  node.lists["shape"] = {-1, order, 1, width};
  node.lists["shape3"] = {-1, order, width};
  node.ints["size"] = order * width;
  node.floats["scale"] = 1.0f / std::sqrt(static_cast<float>(order * width));
}

// Nothing is left behind, and no byte was written beside what was taken.
void expect_clean(const Memory& memory, const char* what) {
  EXPECT(memory.taken.empty() && !memory.overwritten, "%s: %zu blocks are left", what, memory.taken.size());
}

template <class CudaOp>
void providers(const char* name, std::size_t host_input) {
  for (int i = 0; i < kElementCount; ++i) {
    const CudaOp op(api, static_cast<Element>(i));
    EXPECT(std::string(op.GetExecutionProviderType(&op)) == "CUDAExecutionProvider", "%s", name);
    EXPECT(std::string(op.GetName(&op)) == name, "%s", name);
    EXPECT(op.GetOutputType(&op, 0) == ort::element_type(&op), "%s", name);
    for (std::size_t input = 0; input < op.GetInputTypeCount(&op); ++input) {
      const ort::MemoryType expected = input == host_input ? ort::kHostMemory : ort::kDefaultMemory;
      EXPECT(op.GetInputMemoryType(&op, input) == expected, "%s, input %zu", name, input);
    }
  }
}

template <class T>
void hadamard(std::int64_t order, std::int64_t width) {
  Memory memory;
  {
    Node node{"rotate", {}, {}, {}, {}, {{"x"}}, &memory};
    put_transform(node, order, width);
    const Tensor x = random_tensor<T>({3, 2 * order * width}, 7);
    const HadamardOp cpu(api, test::Kind<T>::element);
    const CudaHadamardOp cuda(api, test::Kind<T>::element);
    Kernel expected(cpu, node), kernel(cuda, node);
    EXPECT(kernel.refused().empty(), "%s", kernel.refused().c_str());
    Call there{{&x}, {{kType<T>}}, &memory}, here{{&x}, {{kType<T>}}, &memory};
    EXPECT(expected.run(there).empty(), "CPU");
    const std::size_t before = memory.constants_taken;
    const std::string words = kernel.run(here);
    EXPECT(words.empty(), "%s", words.c_str());
    EXPECT(here.streams_asked == 1 && memory.constants_taken == before, "only the stream is asked for");
    const double error = difference(numbers<T>(here.outputs[0]), numbers<T>(there.outputs[0]));
    EXPECT(error <= 4 * test::Kind<T>::rounding, "%lld x %lld: %g", static_cast<long long>(order),
           static_cast<long long>(width), error);

    Call in_place{{&x}, {x}, &memory};  // the runtime may give the input's memory for the output
    EXPECT(kernel.run(in_place).empty(), "in place");
    EXPECT(numbers<T>(x) == numbers<T>(here.outputs[0]), "in place");
    const Tensor empty = random_tensor<T>({0, order * width}, 1);
    Call none{{&empty}, {{kType<T>}}, &memory};
    EXPECT(kernel.run(none).empty(), "no rows");
    const Tensor ragged = random_tensor<T>({2, order * width + 1}, 1);
    Call wrong{{&ragged}, {{kType<T>}}, &memory};
    EXPECT(kernel.run(wrong).find("no multiple of size") != std::string::npos, "ragged");
  }
  expect_clean(memory, "HadamardTransform");
}

struct MatMul {
  test::Shape shape;
  std::int64_t rotation_order, rotation_width;  // 0: none
  int activation_bits;
  bool half_scales, middle_zeros;
};

template <class T>
void matmul(const MatMul& m) {
  const test::Shape& s = m.shape;
  const auto channels = static_cast<std::int64_t>(s.channels), columns = static_cast<std::int64_t>(s.columns);
  const auto blocks = static_cast<std::int64_t>((s.channels + s.block - 1) / s.block), bits = std::int64_t{s.bits};
  const test::Case weights(s);
  const bool grouped = s.group != s.channels;
  const std::vector<std::int64_t> scales_shape =
      grouped ? std::vector<std::int64_t>{columns, blocks} : std::vector<std::int64_t>{columns};
  const Tensor codes = fake::tensor(ort::kUint8, {columns, blocks, static_cast<std::int64_t>(s.block) * bits / 8}, weights.storage);
  Tensor scales = fake::tensor(ort::kFloat32, scales_shape, weights.scales);
  if (m.half_scales) {
    std::vector<Half> halves(weights.scales.size());
    for (std::size_t i = 0; i < halves.size(); ++i) from_float(weights.scales[i], &halves[i]);
    scales = fake::tensor(ort::kFloat16, scales_shape, halves);
  }
  std::vector<std::uint8_t> zero_bytes = weights.zero_storage;
  if (m.middle_zeros) zero_bytes.assign(zero_bytes.size(), s.bits == 4 ? 0x88 : 0x80);
  const Tensor zeros = fake::tensor(ort::kUint8, {columns, (blocks * bits + 7) / 8}, zero_bytes);
  const Tensor bias = fake::tensor(ort::kFloat32, {columns}, weights.bias);
  const Tensor x = random_tensor<T>({1, static_cast<std::int64_t>(s.rows), channels}, 3);

  Memory memory;
  {
    Node node{"linear",
              {{"K", channels}, {"N", columns}, {"bits", bits}, {"activation_bits", m.activation_bits},
               {"block", static_cast<std::int64_t>(s.block)}, {"block_size", grouped ? static_cast<std::int64_t>(s.block) : 0},
               {"rotate", m.rotation_order != 0}},
              {{"levels", m.activation_bits == 8 ? 127.0f : 7.0f}}, {{"scales_shape", {columns, blocks}}}, {},
              {{"x"}, {"w", &codes}, {"s", &scales}}, &memory};
    put_transform(node, m.rotation_order != 0 ? m.rotation_order : 1, m.rotation_order != 0 ? m.rotation_width : 1);
    if (s.zeros) node.inputs.push_back({"z", &zeros});
    if (s.bias) node.inputs.push_back({"b", &bias});
    const RotatedMatMulOp cpu(api, test::Kind<T>::element);
    const CudaRotatedMatMulOp cuda(api, test::Kind<T>::element);
    Kernel expected(cpu, node), kernel(cuda, node);
    EXPECT(expected.refused().empty() && kernel.refused().empty(), "%s %s", expected.refused().c_str(), kernel.refused().c_str());
    Call there{{&x}, {{kType<T>}}, &memory}, here{{&x}, {{kType<T>}}, &memory};
    EXPECT(expected.run(there).empty(), "CPU");
    const std::size_t before = memory.constants_taken;
    const std::string words = kernel.run(here);
    EXPECT(words.empty(), "%s", words.c_str());
    EXPECT(memory.constants_taken == before && memory.scratch_taken == 1, "one piece of scratch, of the call's stream");
    // Activations that fall to the other side of a rounding change an answer by one step of theirs.
    const double step = m.rotation_order != 0 ? 1.0 / (m.activation_bits == 8 ? 127 : 7) : 0;
    const double error = difference(numbers<T>(here.outputs[0]), numbers<T>(there.outputs[0]));
    EXPECT(error <= step / 4 + 2 * test::Kind<T>::rounding, "K %zu N %zu: %g", s.channels, s.columns, error);

    memory.none_left = true;
    EXPECT(kernel.run(here).find("out of memory") != std::string::npos, "no memory");
    memory.none_left = false;
    const Tensor wrong = random_tensor<T>({2, channels + 1}, 1), empty = random_tensor<T>({0, channels}, 1);
    Call refused{{&wrong}, {{kType<T>}}, &memory}, none{{&empty}, {{kType<T>}}, &memory};
    EXPECT(kernel.run(refused).find("and K is") != std::string::npos, "wrong K");
    EXPECT(kernel.run(none).empty() && none.outputs[0].shape[1] == columns, "no rows");
  }
  expect_clean(memory, "RotatedMatMul");
}

struct Attend {
  std::int64_t kv_heads, group, head_size, batch, tokens, past_slots, total;
  std::vector<std::int32_t> last_slots;
  std::int64_t bits, rotation_order;
  bool masked, in_place;
};

template <class T>
void attention(const Attend& a) {
  const std::int64_t heads = a.kv_heads * a.group, row = (a.bits == 4 ? a.head_size / 2 : a.head_size) + 4;
  test::Random random(11);
  const CacheFormat format{static_cast<std::size_t>(a.head_size), static_cast<int>(a.bits)};
  const auto cache = [&] {
    std::vector<std::uint8_t> rows(static_cast<std::size_t>(a.batch * a.kv_heads * a.past_slots * row));
    std::vector<float> z(format.head_size);
    for (std::size_t at = 0; at < rows.size(); at += static_cast<std::size_t>(row)) {
      for (float& value : z) value = static_cast<float>(random.next());
      cache_scalar().store(format, z.data(), rows.data() + at);
    }
    return fake::tensor(ort::kUint8, {a.batch, a.kv_heads, a.past_slots, row}, rows);
  };
  const Tensor query = random_tensor<T>({a.batch, a.tokens, heads * a.head_size}, 3);
  const Tensor key = random_tensor<T>({a.batch, a.tokens, a.kv_heads * a.head_size}, 4);
  const Tensor value = random_tensor<T>({a.batch, a.tokens, a.kv_heads * a.head_size}, 5);
  const Tensor past_key = cache(), past_value = cache();
  const Tensor lengths = fake::tensor(ort::kInt32, {a.batch}, a.last_slots);
  const Tensor total = fake::tensor(ort::kInt32, {}, std::vector<std::int32_t>{static_cast<std::int32_t>(a.total)});
  const Tensor mask = random_tensor<float>({a.batch, 1, a.tokens, a.total}, 6);
  Memory memory;
  {
    Node node{"attend",
              {{"num_heads", heads}, {"kv_num_heads", a.kv_heads}, {"head_size", a.head_size}, {"bits", a.bits},
               {"row_bytes", row}, {"local_window_size", -1}, {"causal", 1}, {"rotate", a.rotation_order != 0}},
              {{"score_scale", 1.0f / std::sqrt(static_cast<float>(a.head_size))}, {"softcap", 0.0f}}, {}, {},
              {{"q"}, {"k"}, {"v"}, {"pk"}, {"pv"}, {"lengths"}, {"total"}}, &memory};
    if (a.masked) node.inputs.push_back({"mask"});
    const std::int64_t order = a.rotation_order != 0 ? a.rotation_order : 1;
    put_transform(node, order, a.rotation_order != 0 ? a.head_size / order : 1);
    const RotatedAttentionOp cpu(api, test::Kind<T>::element);
    const CudaRotatedAttentionOp cuda(api, test::Kind<T>::element);
    Kernel expected(cpu, node), kernel(cuda, node);
    EXPECT(expected.refused().empty() && kernel.refused().empty(), "%s %s", expected.refused().c_str(), kernel.refused().c_str());
    std::vector<const Tensor*> inputs{&query, &key, &value, &past_key, &past_value, &lengths, &total};
    if (a.masked) inputs.push_back(&mask);
    const std::vector<Tensor> outputs{{kType<T>}, {ort::kUint8}, {ort::kUint8}};
    Call there{inputs, outputs, &memory}, here{inputs, outputs, &memory};
    std::string words = expected.run(there);
    EXPECT(words.empty(), "CPU: %s", words.c_str());
    if (a.in_place) here.outputs = {{kType<T>}, past_key, past_value};
    words = kernel.run(here);
    EXPECT(words.empty(), "%s", words.c_str());
    EXPECT(here.streams_asked == 1 && memory.scratch_taken <= 1, "one piece of scratch at most");
    for (std::size_t output = 1; output < 3; ++output) {
      // A stored code may fall to the other side of a rounding after a rotation.
      const std::vector<std::uint8_t> found = here.outputs[output].values<std::uint8_t>();
      const std::vector<std::uint8_t> wanted = there.outputs[output].values<std::uint8_t>();
      std::size_t differ = found.size() == wanted.size() ? 0 : found.size();
      for (std::size_t i = 0; differ == 0 && i < found.size(); ++i) differ += found[i] != wanted[i];
      EXPECT(differ * 50 <= found.size() * (output == 1 && a.rotation_order != 0), "cache %zu: %zu of %zu bytes differ", output, differ, found.size());
    }
    const double error = difference(numbers<T>(here.outputs[0]), numbers<T>(there.outputs[0]));
    EXPECT(error <= 2e-2, "head size %lld: %g", static_cast<long long>(a.head_size), error);

    const Tensor narrow = random_tensor<T>({a.batch, a.tokens, heads * a.head_size + 2}, 3);
    inputs[0] = &narrow;
    Call wrong{inputs, outputs, &memory};
    EXPECT(kernel.run(wrong).find("input 'query' has the shape") != std::string::npos, "wrong query");
  }
  expect_clean(memory, "RotatedAttention");
}

// A GPU that is too old is told when a kernel is made.
void old_devices() {
  const CudaDevice now = current_device();
  shim::set_device({7, 5, 40, 65536});
  Memory memory;
  Node node{"rotate", {}, {}, {}, {}, {{"x"}}, &memory};
  put_transform(node, 1, 64);
  const auto refused = [&](const ort::CustomOp& op) { return Kernel(op, node).refused(); };
  for (const std::string& words : {refused(CudaHadamardOp(api, Element::kHalf)),
                                   refused(CudaRotatedMatMulOp(api, Element::kHalf)),
                                   refused(CudaRotatedAttentionOp(api, Element::kHalf))}) {
    EXPECT(words.find("the GPU has compute capability 7.5, and graphrot's CUDA kernels need 8.0") != std::string::npos,
           "%s", words.c_str());
  }
  shim::set_device(now);
  const CudaRotatedMatMulOp cuda(api, Element::kHalf);
  const std::string words = refused(cuda);
  EXPECT(words.find("node 'rotate': attribute 'K'") != std::string::npos, "%s", words.c_str());
  expect_clean(memory, "refused");
}

}  // namespace

int main() {
  providers<CudaHadamardOp>("HadamardTransform", 99);
  providers<CudaRotatedMatMulOp>("RotatedMatMul", 99);
  providers<CudaRotatedAttentionOp>("RotatedAttention", 6);

  old_devices();

  hadamard<float>(1, 64);
  hadamard<Half>(12, 16);
  hadamard<BFloat16>(12, 16);

  using test::Values;
  matmul<float>({{3, 96, 40, 32, 32, 4, true, true, Values::kRandom}, 0, 0, 8, false, false});
  matmul<Half>({{2, 192, 24, 192, 32, 4, true, true, Values::kRandom}, 12, 16, 8, true, true});
  matmul<BFloat16>({{1, 64, 16, 64, 16, 8, false, false, Values::kRandom}, 1, 64, 4, false, false});

  attention<float>({2, 2, 64, 2, 3, 5, 8, {7, 4}, 8, 1, true, false});
  attention<Half>({1, 4, 64, 1, 1, 40, 33, {32}, 4, 0, false, true});
  return test::failures == 0 ? 0 : 1;
}
